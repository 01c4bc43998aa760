"""Benchmarks: Penstock and its peers on the same files, in one run, on one machine.

`cpu.py` is the whole of it; model files come from `models.py`, the machine's own limits from `limits.py`, each engine
runs in a process and environment of its own (`peers/`), and `summary.py` turns samples into medians and ratios.
"""
