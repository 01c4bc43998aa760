"""Sessions of clients, kept in the cache by name: saved, restored and erased. In: names. Out: counts of tokens."""
