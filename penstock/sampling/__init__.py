"""Logits → tokens.

In: logits [M, V] of a step and the state of the rows they belong to. Out: for each row a token, and where asked its log
probabilities, or the reason why this row alone has none. Sampling knows nothing of models, caches, blocks or
tokenizers; what ids spell it is told once, as a `Lexicon`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sampling.arrays import UnusableLogits
    from penstock.sampling.row import RowState
    from penstock.sampling.sampler import NO_TOKEN, Sampled, Sampler

__all__ = ["NO_TOKEN", "RowState", "Sampled", "Sampler", "UnusableLogits"]
_HOME = {"RowState": "row", "UnusableLogits": "arrays"}


def __getattr__(name: str) -> Any:
    """Imported on first use: grammars are tried in processes without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock.sampling' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"penstock.sampling.{_HOME.get(name, 'sampler')}"), name)
