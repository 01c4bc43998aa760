"""HTTP in, server-sent events out; JSON and text, never tensors.

In: requests of OpenAI's, Anthropic's, Ollama's and TGI's APIs. Out: responses, whole or streamed. Models run in
processes of their own (`penstock.api.worker`); this package must never import torch.
"""
