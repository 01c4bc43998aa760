"""Uploaded files, stored on disk within limits.

In: multipart bodies, and batches' results. Out: files by id, visible to their tenant only. Client file names are never
used as paths.
"""
