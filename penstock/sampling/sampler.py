"""Logits in, tokens out.

Each row is worked on by itself with numpy, in an order of operations fixed by the row alone, so that what it gets is
the same, bit for bit, in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.engine.plan import Draft
from penstock.sampling.arrays import Array, NothingAllowed, UnusableLogits
from penstock.sampling.choice import draw_filtered
from penstock.sampling.draw import BLOCK, crossing, draw, draw_piece
from penstock.sampling.filters import temper, tempered_sums
from penstock.sampling.likeliest import likeliest
from penstock.sampling.logprobs import beam_candidates, token_logprobs
from penstock.sampling.random import Purpose, uniform
from penstock.sampling.row import RowState
from penstock.types import TokenLogprobs

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one row got. With an error, `token` is NO_TOKEN and nothing else is set."""

    token: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[tuple[int, float], ...] = ()  # beams: (token, log probability), likeliest first
    error: str | None = None
    unfit: bool = False  # the error is the request's own fault
    forced: bool = False  # taken so that the answer ends within its budget
    mu: float | None = None  # mirostat's, after the token


class Sampler:
    """Chooses tokens. It holds no random state: a draw depends on seed, sibling and position. It changes no row."""

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sampled]:
        """The next token of each row, from logits [M, V]."""
        return [self._choose(values, row) for values, row in zip(_rows(logits), rows, strict=True)]

    def verify(self, logits: Tensor | Array, row: RowState, draft: tuple[Draft, ...]) -> list[Sampled]:
        """The tokens the row would get one at a time, as far as the draft guessed them, and one more.

        logits [1 + k, V]: row 0 follows the last known token, row i + 1 follows draft[i].
        """
        values = logits if isinstance(logits, Array) else _rows(logits)
        length = len(row.tokens)
        sampled: list[Sampled] = []
        try:
            after: int | None = -1
            while after is not None:
                chosen = self._choose(values[after + 1], row)
                sampled.append(chosen)
                after = _guess(draft, after, chosen.token)
                if after is not None:
                    row.append(chosen.token, chosen.mu)
                    if row.finished:
                        break
        finally:
            row.truncate(length)
        return sampled

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], num: int) -> list[TokenLogprobs]:
        """For each row of logits [M, V] its target token and the `num` likeliest; raises UnusableLogits."""
        report = []
        for values, target in zip(_rows(logits), targets, strict=True):
            likeliest(values)
            report.append(token_logprobs(values, target, num))
        return report

    def _choose(self, logits: Array, row: RowState) -> Sampled:
        try:
            if row.request.beam is not None:
                return self._rank_beam(logits, row.request.beam.beam_width)
            token, forced, mu = self._token(logits, row)
        except UnusableLogits as error:
            return Sampled(NO_TOKEN, error=str(error), unfit=isinstance(error, NothingAllowed))
        num = row.num_logprobs
        return Sampled(token, None if num is None else token_logprobs(logits, token, num), forced=forced, mu=mu)

    def _rank_beam(self, logits: Array, beam_width: int) -> Sampled:
        return Sampled(likeliest(logits), candidates=beam_candidates(logits, beam_width))

    def _token(self, logits: Array, row: RowState) -> tuple[int, bool, float | None]:
        """The token, whether it was taken in place of another that would have left no way to an end, and mirostat's mu
        after it."""
        mu = row.samplers.mu
        token = likeliest(logits)
        edited = row.edit(logits)
        if edited is not logits:
            token = _likeliest_allowed(edited, row)
        if not row.request.sampling.greedy:
            token, mu = self._draw(edited, token, row)
        other = row.instead_of(token, edited)
        return (token, False, mu) if other is None else (other, True, mu)

    def _draw(self, edited: Array, likeliest: int, row: RowState) -> tuple[int, float | None]:
        top = float(edited[likeliest])
        if not row.unfiltered:
            return draw_filtered(edited, top, row)
        share = uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.TOKEN)
        return _draw_any(edited, top, row.request.sampling.temperature, share), None


def _draw_any(logits: Array, top: float, temperature: float, share: float) -> int:
    """A draw from the whole vocabulary; only the piece that it falls into is looked at closely."""
    piece, rest = draw_piece(tempered_sums(logits, top, temperature), share)
    weights = temper(logits[piece * BLOCK : (piece + 1) * BLOCK], top, temperature)
    if not weights.any():  # what is left of a piece may be too small for another's rounding
        return draw(temper(logits, top, temperature), share)
    return piece * BLOCK + crossing(weights, rest, "exceed")


def _guess(draft: tuple[Draft, ...], parent: int, token: int) -> int | None:
    """The guess of this token after that parent, where there is one; a guess always comes later than its parent."""
    wanted = Draft(token, parent)
    return next((i for i in range(parent + 1, len(draft)) if draft[i] == wanted), None)


def _rows(logits: Tensor) -> Array:
    values: Array = logits.detach().float().contiguous().numpy(force=True)
    return values


def _likeliest_allowed(edited: Array, row: RowState) -> int:
    """As `likeliest`, for logits that were sound before the request's own masks."""
    try:
        return likeliest(edited)
    except UnusableLogits as error:
        raise NothingAllowed(nothing_allowed(row)) from error


def nothing_allowed(row: RowState) -> str:
    sampling, bad_words = row.request.sampling, row.request.bad_words
    allowed = "all" if sampling.allowed_token_ids is None else len(sampling.allowed_token_ids)
    grammar = "" if sampling.structured_outputs is None else "structured_outputs, "
    grammar += "logits_processors, " if sampling.logits_processors else ""
    return (
        f"{grammar}allowed_token_ids ({allowed}), bad_words ({len(bad_words)}) and min_tokens "
        f"({sampling.min_tokens}) leave no token to choose: allow more tokens"
    )
