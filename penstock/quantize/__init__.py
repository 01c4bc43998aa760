"""Make quantized and pruned models of others, and measure what that costs.

In: a checkpoint, and tokens of a calibration text. Out: a folder in compressed-tensors format or a GGUF file, and a
report. One block of the model is in memory at a time. Nothing here knows the engine or the server.
"""
