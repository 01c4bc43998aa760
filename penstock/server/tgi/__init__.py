"""Hugging Face's text-generation-inference API.

In: bodies of `inputs` and `parameters`. Out: responses in TGI's format. Nothing here generates.
"""
