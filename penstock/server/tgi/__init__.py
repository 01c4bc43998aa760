"""The API of Hugging Face's text-generation-inference over the same core.

In: bodies of `inputs` and `parameters`. Out: the core's answers in TGI's shapes. Nothing here generates.
"""
