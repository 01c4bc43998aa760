"""Ollama's API.

In: Ollama's bodies. Out: JSON lines in Ollama's format. A body becomes an OpenAI body or a prompt; nothing here
generates.
"""
