"""Transformations from dense gradients to payloads."""
