"""Files that clients upload and fetch, kept on disk within bounds.

In: multipart bodies, and what batches write. Out: files by their ids, each seen by its tenant alone. A client's names
are told again and never used as paths.
"""
