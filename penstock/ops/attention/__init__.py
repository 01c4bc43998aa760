"""Attention over the paged cache, and what writes it: rope, cache writes, step inputs."""
