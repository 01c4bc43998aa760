"""Prompts that one server computes and another answers: what the router asks of each, and what they tell."""
