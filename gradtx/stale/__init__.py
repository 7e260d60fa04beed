"""Asynchronous updates: workers at their own pace, and a server that owns the parameters.

`server` and `worker` are the two sides. They speak in `frames`, which travel through a store
(`mailbox`): a worker's end of the line is `link`, the server's `switchboard`. `push` and
`parameters` are what the frames carry, `master` is what the server steps.
"""
