"""Prompt tokens that a fleet computes, by how it chooses replicas: `python -m bench.fleet`."""
