"""Ops on logits: argmax, sampling, filters, log probabilities."""
