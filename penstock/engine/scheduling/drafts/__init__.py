"""Drafting models, and rows that wait while drafts are verified."""
