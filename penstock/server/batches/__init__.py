"""Batches that a server answers beside its clients, and goes on with after a restart.

In: a file of requests. Out: files of answers and of errors. Each line is asked of the server's own routes, as its
tenant and behind everything that clients wait for; what is written down is not asked again.
"""
