"""Requests in, plans to an executor, deltas out. Knows nothing of tensors, devices or text."""
