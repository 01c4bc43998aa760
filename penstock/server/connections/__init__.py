"""Accept, bound and close HTTP/1.1 connections.

In: bytes from clients. Out: requests for the app, and the bytes of its responses. Knows nothing of models.
"""
