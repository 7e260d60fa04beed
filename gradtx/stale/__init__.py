"""Asynchronous updates: workers at their own pace, and a server that owns the parameters."""
