"""Ollama's API over the same core.

In: bodies in Ollama's words. Out: the core's answers in Ollama's shapes, line by line. Nothing here generates: a body
becomes an OpenAI one or a prompt, and the core does the rest.
"""
