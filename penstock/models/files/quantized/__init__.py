"""Quantized safetensors folders, one file per method.

In: a folder's tensors and its `quantization_config`. Out: a checkpoint with the names and shapes of the plain model,
whose matrices can be had in their codes or widened. Unknown methods, and keys that change the meaning, are refused.
"""
