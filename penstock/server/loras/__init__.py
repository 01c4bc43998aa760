"""Adapters of a server: their names, who uses them, and the routes that load and unload them."""
