"""HTTP in, server-sent events out. JSON and text, never tensors.

In: requests of OpenAI's and its neighbours' interfaces. Out: answers, streamed or whole, and what the server says of
itself. The models run in processes of their own (`penstock.worker`); this package must never import torch.
"""
