"""How a weight is stored: one file per format.

In: a matrix as the checkpoint holds it. Out: a `Scheme` that multiplies by it and looks its rows up. A scheme knows
nothing of the layer it serves.
"""
