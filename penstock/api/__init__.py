"""The Python interface: prompts in, outputs out.

`assemble` builds an engine; `LLM` and `AsyncLLM` drive it; `worker` is the engine process of a server.
"""
