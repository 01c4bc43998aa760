"""Checkpoints: a config becomes a ModelSpec, a ModelSpec and tensors become a Decoder or an Encoder.

In: a config and a checkpoint's tensors. Out: a model whose `forward` takes a step. It knows nothing of sequences,
scheduling or sampling. Checkpoint spellings live in `names.py` and `families/` alone.
"""

from __future__ import annotations

from penstock.models import families  # noqa: F401  registers every family
