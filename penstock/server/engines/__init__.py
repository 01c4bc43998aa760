"""Start, watch and replace engine processes, and queue requests for them.

In: requests of models. Out: deltas. Knows the engine's messages, not HTTP.
"""
