"""The live view's cost: `penstock serve` over an engine whose scheduler and cache are real and whose device only waits.

`worker.py` is that engine process, `server.py` starts the server over it, `__main__.py` counts the CPU seconds of both
with viewers and without.
"""
