"""One rank on an NVIDIA GPU: plans are started without waiting for those before them.

A row's last token, blocks and sampling parameters live on the device; a decode step is a captured graph that reads
them, so the host sends a few numbers per row and gets a token back.
"""
