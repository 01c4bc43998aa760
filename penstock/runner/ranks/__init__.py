"""Several processes that run one model: rank 0, in the engine's process, samples; the others compute their share.

In: plans and control messages, which go to all ranks in order. Out: results, or the loss of a rank. Messages are
msgspec's, over authenticated connections; nothing is ever unpickled. Nothing here knows of schedulers or HTTP.
"""
