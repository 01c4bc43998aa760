"""Bytes of cache blocks outside the pool, by name: in memory and in files. Knows nothing of tokens, plans or layers."""
