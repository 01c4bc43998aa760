"""A server under attack, and how long it keeps others waiting meanwhile.

In: attacks, each a few requests of a hostile client. Out: gaps and waits of the others, and the server's memory.
"""
