"""One rank on an NVIDIA GPU: plans are started without waiting for those before them.

What the device must know of a row (its last token, its blocks, how it is sampled) lives there; a step of single tokens
is a recorded graph that reads it, so the host sends a few numbers per row and gets a token back.
"""
