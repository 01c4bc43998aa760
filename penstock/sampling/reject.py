"""Rejection sampling: verify draft tokens so that answers have the target's distribution, though not its own tokens.

A draft token x that was drawn with probability q(x) is accepted with probability p(x) / q(x), at most 1; else the token
is drawn from what p has more than q (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative
Decoding", 2023). Whether a token is verified must not depend on it, nor on the number it was drawn with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.plan import Draft
from penstock.sampling.draw import Purpose, draw, uniform
from penstock.sampling.filters import apply_temperature
from penstock.sampling.logits import Array, UnusableLogits
from penstock.sampling.rare.chain import apply_chain
from penstock.sampling.row import RowState
from penstock.sampling.sampler import Sampled, token_logprobs
from penstock.sampling.topk import argmax


def can_reject(row: RowState) -> bool:
    """True if a row's distribution is known before it draws: not with a grammar's budget, nor mirostat's feedback."""
    sampling = row.request.sampling
    return not sampling.greedy and row.guide is None and row.failure is None and row.samplers.mu is None


def find_shares(logits: Array, row: RowState) -> Array:
    """Return the probability of each token [V] after the row's penalties, masks and filters; raises UnusableLogits."""
    edited = row.edit(logits)
    top = float(edited[argmax(edited)])
    ids, weights = None, None
    if row.has_filters:
        ids, weights = apply_chain(edited, top, row)
    else:
        weights = apply_temperature(edited, top, row.request.sampling.temperature)
    shares = np.zeros(len(logits))
    shares[slice(None) if ids is None else ids] = weights / weights.sum(dtype=np.float64)
    return shares


def draw_draft(shares: Array, row: RowState) -> int:
    """Draw a draft token, with a number that no other token of the row is drawn with."""
    return draw(shares, uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.DRAFT))


def verify_by_rejection(
    logits: Array, row: RowState, draft: Sequence[Draft], drawn_from: Sequence[Array]
) -> list[Sampled]:
    """Return the accepted tokens of a line and one more. logits [1 + k, V]; each token of the draft was drawn from the
    shares in `drawn_from`."""
    length, sampled = len(row.tokens), []
    try:
        for place in range(len(draft) + 1):
            shares = find_shares(logits[place], row)
            if place < len(draft):
                is_accepted, token = _take(shares, row, draft[place].token, drawn_from[place])
            else:
                share = uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.TOKEN)
                is_accepted, token = False, draw(shares, share)
            num = row.num_logprobs
            ids = row.request.sampling.logprob_token_ids or ()
            sampled.append(Sampled(token, None if num is None else token_logprobs(logits[place], token, num, ids)))
            if not is_accepted:
                break
            row.append(token)
            if row.has_stopped:
                break
    except UnusableLogits as error:
        sampled.append(Sampled(-1, error=str(error)))
    finally:
        row.truncate(length)
    return sampled


def _take(shares: Array, row: RowState, token: int, drawn_from: Array) -> tuple[bool, int]:
    """Return True and the draft token, or False and another."""
    request, position = row.request, len(row.tokens)
    if uniform(request.seed, row.sibling, position, Purpose.ACCEPT) * drawn_from[token] < shares[token]:
        return True, token
    rest = np.maximum(shares - drawn_from, 0.0)
    rest = rest if rest.any() else shares
    return False, draw(rest, uniform(request.seed, row.sibling, position, Purpose.REST))
