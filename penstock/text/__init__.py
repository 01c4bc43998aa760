"""Strings to token ids and back.

In: tokenizer files or a GGUF file's metadata, prompts, chat messages, sampled ids. Out: ids, and text deltas that never
end in half a character. Text knows nothing of models, devices or the engine: ids in, strings out.
"""
