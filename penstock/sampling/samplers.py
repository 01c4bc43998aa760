"""DRY and mirostat of one row: samplers that look at more than the logits."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sampling.arrays import Array
from penstock.sampling.dry import Dry
from penstock.sampling.mirostat import first_mu
from penstock.types import Request


class Samplers:
    """All that they know of a row's text. `mu` is mirostat's after that text, where the row goes on elsewhere."""

    def __init__(self, request: Request, tokens: Sequence[int], mu: float | None = None) -> None:
        sampling = request.sampling
        plain = request.beam is not None
        self.dry = Dry(sampling, request.dry_breakers, tokens) if sampling.has_dry and not plain else None
        self._mus: list[float] = []  # after the text, and after each token appended to it
        if sampling.mirostat and not sampling.greedy and not plain:
            self._mus.append(first_mu(sampling.mirostat_tau) if mu is None else mu)
        self._length = len(tokens)

    @property
    def mu(self) -> float | None:
        return self._mus[-1] if self._mus else None

    def append(self, token: int, mu: float | None) -> None:
        """A token, and mirostat's mu after it."""
        if self.dry is not None:
            self.dry.append(token)
        if self._mus:
            self._mus.append(self._mus[-1] if mu is None else mu)
        self._length += 1

    def truncate(self, length: int) -> None:
        if self.dry is not None:
            self.dry.truncate(length)
        if self._mus:
            del self._mus[len(self._mus) - (self._length - length) :]
        self._length = length

    def edit(self, logits: Array) -> None:
        if self.dry is not None:
            self.dry.apply(logits)
