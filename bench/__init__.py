"""Benchmarks: Penstock and its peers on the same files, in one run, on one machine.

`cpu.py` measures engines: model files come from `models.py`, the machine's own limits from `limits.py`, each engine
runs in a process and environment of its own (`peers/`), and `summary.py` turns samples into medians and ratios.
`gpu.py` measures Penstock on a GPU beside what the device could do at best (`roofline.py`, `ceilings.py`), `ops.py` its
ops by themselves. `serving.py` and `serving_compare.py` measure servers under load (`load/`).
"""
