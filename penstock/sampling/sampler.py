"""Sample tokens from logits.

Each row is processed alone in numpy, in a fixed order of operations, so its result is the same, bit for bit, in any
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.plan import Draft
from penstock.ops import log_softmax
from penstock.sampling.draw import BLOCK, Purpose, draw, draw_block, find_crossing, uniform
from penstock.sampling.filters import apply_temperature, compute_weight_sums
from penstock.sampling.logits import Array, NothingAllowed, UnusableLogits
from penstock.sampling.rare.chain import filter_and_draw, find_shares
from penstock.sampling.row import RowState
from penstock.sampling.topk import argmax, rank, rank_top_k
from penstock.types import Logprob, TokenLogprobs


def log_probabilities(logits: Array) -> Array:
    """Compute the log-softmax of one row [V]."""
    result: Array = log_softmax(torch.from_numpy(logits)[None])[0].numpy()
    return result


def token_logprobs(logits: Array, token: int, num: int, ids: Sequence[int] = ()) -> TokenLogprobs:
    """Return the log probability and rank of `token` and of the `num` likeliest, or of `ids` instead."""
    values = log_probabilities(logits)
    report = {token: Logprob(float(values[token]), rank(logits, token))}
    if ids:
        return report | {id: Logprob(float(values[id]), rank(logits, id)) for id in ids}
    for place, other in enumerate(rank_top_k(logits, num).tolist(), start=1):
        report.setdefault(other, Logprob(float(values[other]), place))
    return report


def share_logprobs(shares: Array, token: int, num: int, ids: Sequence[int] = ()) -> TokenLogprobs:
    """Return the log probability and rank of `token` and of the `num` likeliest that can be drawn, or of `ids`
    instead, by their shares."""
    possible = np.flatnonzero(shares)
    ranked = possible[np.argsort(-shares[possible], kind="stable")][:num]
    report: TokenLogprobs = {}
    for id in (token, *(ids or ranked.tolist())):
        own = float(shares[id])
        rank = 1 + int(np.count_nonzero(shares > own) + np.count_nonzero(shares[:id] == own))
        report.setdefault(id, Logprob(math.log(own) if own else -math.inf, rank))
    return report


def report_logprobs(logits: Array, token: int, row: RowState) -> TokenLogprobs | None:
    """Return the logprobs that a row asks for: the model's own, or of what its samplers leave."""
    num = row.num_logprobs
    if num is None:
        return None
    ids = row.request.sampling.logprob_token_ids or ()
    if row.request.sampling.post_sampling_probs:
        return share_logprobs(find_shares(logits, row), token, num, ids)
    return token_logprobs(logits, token, num, ids)


def beam_candidates(logits: Array, beam_width: int) -> tuple[tuple[int, float], ...]:
    """Return the 2 * beam_width likeliest tokens, so that beam_width remain if as many end their beam."""
    values = log_probabilities(logits)
    ids = rank_top_k(logits, 2 * beam_width)
    return tuple((int(token), float(values[token])) for token in ids if logits[token] > -torch.inf)


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result for one row. With an error, `token` is NO_TOKEN and nothing else is set."""

    token: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[tuple[int, float], ...] = ()  # beam search: (token, log probability), likeliest first
    error: str | None = None
    unfit: bool = False  # the request's own constraints are at fault
    forced: bool = False  # replaces the sampled token so that the answer ends within its budget
    mu: float | None = None  # of mirostat, after the token


class Sampler:
    """Samples tokens without random state: a draw depends on seed, sibling and position. Changes no row."""

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sampled]:
        """Sample the next token of each row from logits [M, V]."""
        return [self._choose(values, row) for values, row in zip(_to_numpy(logits), rows, strict=True)]

    def verify(self, logits: Tensor | Array, row: RowState, draft: tuple[Draft, ...]) -> list[Sampled]:
        """Return the tokens the row would get one at a time, as far as the draft matches, and one more.

        logits [1 + k, V]: row 0 follows the last known token, row i + 1 follows draft[i].
        """
        values = logits if isinstance(logits, Array) else _to_numpy(logits)
        length = len(row.tokens)
        sampled: list[Sampled] = []
        try:
            after: int | None = -1
            while after is not None:
                chosen = self._choose(values[after + 1], row)
                sampled.append(chosen)
                after = _find_child(draft, after, chosen.token)
                if after is not None:
                    row.append(chosen.token, chosen.mu)
                    if row.is_finished or row.has_stopped:
                        break
        finally:
            row.truncate(length)
        return sampled

    def propose(self, logits: Array, row: RowState) -> tuple[int, float | None] | None:
        """Return the token that the row would get from a drafting model's logits [V], and the mirostat mu after it;
        None if they leave none."""
        try:
            token, _, mu = self._token(logits, row)
        except UnusableLogits:
            return None
        return token, mu

    def probabilities(self, logits: Array, likeliest: int, tokens: Sequence[int]) -> dict[int, float]:
        """Return the shares of `tokens` in the softmax of logits [V]; `likeliest` has the largest."""
        top = float(logits[likeliest])
        total = float(compute_weight_sums(logits, top, 1.0).sum())
        return {token: math.exp(float(logits[token]) - top) / total for token in tokens}

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Return logprobs of each row's target and of the `num` likeliest; raise UnusableLogits if logits are bad."""
        report = []
        for values, target in zip(_to_numpy(logits), targets, strict=True):
            argmax(values)
            report.append(token_logprobs(values, target, num))
        return report

    def _choose(self, logits: Array, row: RowState) -> Sampled:
        try:
            if row.request.beam is not None:
                return self._rank_beam(logits, row.request.beam.beam_width)
            token, forced, mu = self._token(logits, row)
        except UnusableLogits as error:
            return Sampled(NO_TOKEN, error=str(error), unfit=isinstance(error, NothingAllowed))
        return Sampled(token, report_logprobs(logits, token, row), forced=forced, mu=mu)

    def _rank_beam(self, logits: Array, beam_width: int) -> Sampled:
        return Sampled(argmax(logits), candidates=beam_candidates(logits, beam_width))

    def _token(self, logits: Array, row: RowState) -> tuple[int, bool, float | None]:
        """Return the token, True if it replaces one that left no way to end, and the mirostat mu after it."""
        mu = row.samplers.mu
        token = argmax(logits)
        edited = row.edit(logits)
        if edited is not logits:
            token = _pick_allowed_token(edited, row)
        if not row.request.sampling.greedy:
            token, mu = self._draw(edited, token, row)
        other = row.instead_of(token, edited)
        return (token, False, mu) if other is None else (other, True, mu)

    def _draw(self, edited: Array, argmax: int, row: RowState) -> tuple[int, float | None]:
        top = float(edited[argmax])
        if row.has_filters:
            return filter_and_draw(edited, top, row)
        share = uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.TOKEN)
        return _draw_from_all(edited, top, row.request.sampling.temperature, share), None


def _draw_from_all(logits: Array, top: float, temperature: float, share: float) -> int:
    """Draw from the whole vocabulary; only the block that the draw falls into is scanned."""
    piece, rest = draw_block(compute_weight_sums(logits, top, temperature), share)
    weights = apply_temperature(logits[piece * BLOCK : (piece + 1) * BLOCK], top, temperature)
    if not weights.any():  # the rest of a block may vanish in rounding
        return draw(apply_temperature(logits, top, temperature), share)
    return piece * BLOCK + find_crossing(weights, rest, "exceed")


def _find_child(draft: tuple[Draft, ...], parent: int, token: int) -> int | None:
    """Return the index of the draft token `token` after `parent`, or None; children follow their parents."""
    wanted = Draft(token, parent)
    return next((i for i in range(parent + 1, len(draft)) if draft[i] == wanted), None)


def _to_numpy(logits: Tensor) -> Array:
    values: Array = logits.detach().float().contiguous().numpy(force=True)
    return values


def _pick_allowed_token(edited: Array, row: RowState) -> int:
    """Like `argmax`, but blame the request's masks: the logits were valid before them."""
    try:
        return argmax(edited)
    except UnusableLogits as error:
        raise NothingAllowed(describe_nothing_allowed(row)) from error


def describe_nothing_allowed(row: RowState) -> str:
    sampling, bad_words = row.request.sampling, row.request.bad_words
    allowed = "all" if sampling.allowed_token_ids is None else len(sampling.allowed_token_ids)
    grammar = "" if sampling.structured_outputs is None else "structured_outputs, "
    grammar += "logits_processors, " if sampling.logits_processors else ""
    return (
        f"{grammar}allowed_token_ids ({allowed}), bad_words ({len(bad_words)}) and min_tokens "
        f"({sampling.min_tokens}) leave no token to sample: allow more tokens"
    )
