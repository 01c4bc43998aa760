"""Flags shared by several commands, and the sources of their values."""
