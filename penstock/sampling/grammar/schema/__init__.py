"""Rewrite JSON schemas in the keywords that llguidance supports."""
