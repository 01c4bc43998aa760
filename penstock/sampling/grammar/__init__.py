"""Structured output: compile grammars, mask tokens, close answers within their token budget."""
