"""Check an installation against plain float32 arithmetic: its ops, the layers of a model, and a few prompts.

In: a loaded `LLM`. Out: one `Finding` per part that was compared. The reference is the ops' meaning in PyTorch, over
weights that are read anew, so a wrong kernel, a wrong fusion, wrong packing and broken memory all show.
"""
