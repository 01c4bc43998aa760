"""Drafting models on a GPU: steps of their own after a step whose tokens the host knows.

Draft tokens are drawn on the device, by the rows' own seeds and positions, and the host reads them once for each step.
"""
