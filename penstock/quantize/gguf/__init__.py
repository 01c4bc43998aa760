"""Write GGUF files: blocks of every type, mixes of types, metadata and tokenizers.

In: matrices in float32 with the importance of their inputs. Out: bytes that the readers in `penstock/models/files` and
other programs take. The way back from bytes is `penstock/quant/gguf.py`.
"""
