"""Tokenizers from folders and GGUF files: text to ids, ids to text."""
