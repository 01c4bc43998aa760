"""Turn logits into tokens.

In: the logits [M, V] of a step and the state of their rows. Out: per row a token and, if asked, its log probabilities,
or the error of that row alone. Sampling knows nothing of models, caches, blocks or tokenizers; a `Lexicon` tells it
what ids spell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sampling.logits import UnusableLogits
    from penstock.sampling.row import RowState
    from penstock.sampling.sampler import NO_TOKEN, Sampled, Sampler

__all__ = ["NO_TOKEN", "RowState", "Sampled", "Sampler", "UnusableLogits"]
_HOME = {"RowState": "row", "UnusableLogits": "logits"}


def __getattr__(name: str) -> Any:
    """Import `name` on first use: grammars compile in processes without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock.sampling' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"penstock.sampling.{_HOME.get(name, 'sampler')}"), name)
