"""Measure what one model loses against another: predictions of a text, and speed."""
