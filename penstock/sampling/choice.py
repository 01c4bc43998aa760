"""A draw from the tokens that filters leave.

The order is top_n_sigma, temperature, min_p, top_k, top_p, typical_p, xtc. A dynamic temperature comes last, after
filters at a temperature of 1; mirostat is all by itself, after the temperature.
"""

from __future__ import annotations

from penstock.sampling.arrays import Array
from penstock.sampling.draw import draw
from penstock.sampling.dynatemp import dynamic_temperature
from penstock.sampling.filters import at_least_as_likely, candidates, narrow, temper, tempered_sums, top_n_sigma
from penstock.sampling.likeliest import largest, ranked
from penstock.sampling.mirostat import NUM_ESTIMATED, least_weight, next_mu, num_kept
from penstock.sampling.random import Purpose, uniform
from penstock.sampling.row import RowState
from penstock.sampling.xtc import xtc


def draw_filtered(logits: Array, top: float, row: RowState) -> tuple[int, float | None]:
    """A token, and mirostat's mu after it; `top` is the largest logit."""
    mu = row.samplers.mu
    ids, weights = _left(logits, top, row) if mu is None else _surprising(logits, top, row, mu)
    place = draw(weights, uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.TOKEN))
    if mu is not None:
        sampling = row.request.sampling
        probability = float(weights[place]) / float(weights.sum(dtype="float64"))
        mu = next_mu(mu, probability, sampling.mirostat_tau, sampling.mirostat_eta)
    return (place if ids is None else int(ids[place])), mu


def _left(logits: Array, top: float, row: RowState) -> tuple[Array | None, Array]:
    """Ids (None: all) and weights that filters leave."""
    sampling = row.request.sampling
    if sampling.top_n_sigma > 0:
        logits = top_n_sigma(logits, top, sampling.top_n_sigma)
    is_dynamic = sampling.dynatemp_range > 0
    ids, weights = candidates(logits, top, sampling, 1.0 if is_dynamic else sampling.temperature)
    if sampling.has_xtc:
        chance = uniform(row.request.seed, row.sibling, len(row.tokens), Purpose.XTC)
        if chance < sampling.xtc_probability:
            ids, weights = narrow(ids, weights, xtc(weights, sampling.xtc_threshold))
    if is_dynamic:
        left = logits if ids is None else logits[ids]
        weights = temper(left, float(left.max()), dynamic_temperature(weights, sampling))
    return ids, weights


def _surprising(logits: Array, top: float, row: RowState, mu: float) -> tuple[Array | None, Array]:
    """Filter logits by mirostat."""
    sampling = row.request.sampling
    heat = sampling.temperature
    if sampling.mirostat == 1:
        likeliest = logits[ranked(logits, min(NUM_ESTIMATED, len(logits)))]
        ids = largest(logits, num_kept(likeliest, heat, mu, len(logits)))
        return ids, temper(logits[ids], top, heat)
    return at_least_as_likely(logits, top, heat, least_weight(float(tempered_sums(logits, top, heat).sum()), mu))
