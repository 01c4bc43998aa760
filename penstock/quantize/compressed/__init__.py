"""Write model folders in the compressed-tensors format, as vLLM and transformers read it.

A matrix becomes `weight_packed` (int4, int8 in words of 32 bits, lowest first, offset by half the range) or `weight`
(int8, FP8), with `weight_scale` and, where it is not symmetric, `weight_zero_point`.
"""
