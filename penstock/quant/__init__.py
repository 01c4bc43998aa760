"""Storage formats of weights, one file each.

In: a matrix as the checkpoint holds it. Out: a `Scheme` that multiplies by it and looks its rows up. A scheme knows
nothing of the layer it serves.
"""
