"""Batches that a server runs beside its clients and resumes after a restart.

In: a file of requests. Out: files of responses and errors. Each line is posted to the server's own routes as its
tenant, behind waiting clients; lines that are written are not repeated.
"""
