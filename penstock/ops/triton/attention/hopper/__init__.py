"""Prompt attention on Hopper: one warp copies queries, keys and values by TMA, two warpgroups compute.

Queries and the paged cache come in, the tiles' rows of the result go out. It needs Gluon, which not every Triton has.
"""
