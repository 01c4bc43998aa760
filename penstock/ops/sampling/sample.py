"""Draw a token of each row of logits on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op
from penstock.ops.sampling import extras as samplers
from penstock.ops.sampling.extras import Extras
from penstock.ops.sampling.row_params import RowParams, count_tokens, edit_logits, filter_logits

BAD = -1  # in place of a token where logits are no numbers
NOTHING = -2  # where a mask leaves no token
VOCAB_TILE = 4096  # tokens under one sum
GOLDEN = 0x9E3779B9
_WORD = (1 << 32) - 1


def mix_bits(x: Tensor) -> Tensor:
    """Hash x to 32-bit numbers, in int64, with every bit of x spread over them."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def shares(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random numbers in [0, 1) for each of keys[S] and positions[S]."""
    place = positions.to(torch.int64)
    first = mix_bits((keys & _WORD) ^ mix_bits(place))
    second = mix_bits(mix_bits((keys >> 32) ^ mix_bits(place + GOLDEN)) ^ first)
    return (first >> 8).float() * 2.0**-24, (second >> 8).float() * 2.0**-24


def chances(keys: Tensor, positions: Tensor) -> Tensor:
    """Return a third random number in [0, 1) for each of keys[S] and positions[S]."""
    place = positions.to(torch.int64)
    third = mix_bits(mix_bits((keys >> 32) ^ mix_bits(place + 2 * GOLDEN)) ^ mix_bits(keys & _WORD))
    return (third >> 8).float() * 2.0**-24


def _invert_cdf(weights: Tensor, share: Tensor) -> Tensor:
    """Return the first index of weights[S, n] at which their running sum exceeds share[S] of the whole."""
    sums = weights.cumsum(-1)
    whole = sums[:, -1:]
    return torch.minimum((sums <= share[:, None] * whole).sum(-1), (sums < whole).sum(-1))


@op(tolerance={torch.float32: 0.0})
def sample(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    last: Tensor | None = None,
    row_params: RowParams | None = None,
    extras: Extras | None = None,
) -> Tensor:
    """Draw a token of each row of logits[S, V] with the probabilities softmax(logits / temperature) → [S] int64.

    With temperature[S] 0 it is the first of the likeliest. The row's key and position alone decide what is drawn: first
    a tile of the vocabulary, then a token of it.

    With rows[S], a row's temperature and key are those of its entry rows[s], and its token is stored in last[rows]
    too. With row_params, the entry's biases, penalties, mask and filters come first, and the token is counted there if
    the row has penalties; with extras, which need row_params, the rarely used samplers. A row with a NaN, or without a
    finite largest logit, gets BAD, and one whose mask leaves no token NOTHING.
    """
    if rows is not None:
        temperature, keys = temperature[rows], keys[rows]
    num_rows, size = logits.shape
    raw_top = logits.float().amax(-1)
    x = logits.float()
    temp = temperature
    if row_params is not None and rows is not None:
        x, temp = _apply_samplers(logits, temperature, keys, positions, rows, row_params, extras)
    drawn_from = x
    x = torch.nn.functional.pad(x, (0, -size % VOCAB_TILE), value=-torch.inf)
    temp = torch.where(temp > 0, temp, 1.0)[:, None]
    top = x.amax(-1, keepdim=True)
    weights = torch.exp((x - top) / temp).view(num_rows, x.shape[1] // VOCAB_TILE, VOCAB_TILE)
    tile_shares, tokens = shares(keys, positions)
    tile = _invert_cdf(weights.sum(-1), tile_shares)
    within = weights[torch.arange(num_rows), tile.clamp(max=weights.shape[1] - 1)]
    drawn = tile * VOCAB_TILE + _invert_cdf(within, tokens)
    chosen = torch.where(temperature > 0, drawn, x.argmax(-1))
    chosen = torch.where(top[:, 0] == -torch.inf, NOTHING, chosen)
    chosen = torch.where(logits.isnan().any(-1) | ~raw_top.isfinite(), BAD, chosen)
    if rows is not None and last is not None:
        last[rows] = chosen
    if rows is not None and row_params is not None:
        count_tokens(row_params, rows[chosen >= 0], chosen[chosen >= 0])
        if extras is not None:
            temp = torch.where(temperature > 0, temp[:, 0], 0.0)
            samplers.update_samplers(drawn_from, temp, row_params, extras, rows, positions, chosen)
    return chosen


def _apply_samplers(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor,
    row_params: RowParams,
    extras: Extras | None,
) -> tuple[Tensor, Tensor]:
    """Return the logits that may be drawn, and the temperatures to draw with."""
    x = edit_logits(logits, row_params, rows)
    if extras is None:
        return filter_logits(x, temperature, row_params, rows), temperature
    x = samplers.apply_top_n_sigma(samplers.apply_dry(x, extras, rows, positions), extras, rows)
    samplers.set_mirostat_cut(x, temperature, row_params, extras, rows)
    is_dynamic = extras.numbers[rows, samplers.DYNATEMP_RANGE] > 0
    temp = torch.where(is_dynamic & (temperature > 0), 1.0, temperature)
    x = samplers.apply_xtc(filter_logits(x, temp, row_params, rows), temp, chances(keys, positions), extras, rows)
    return x, samplers.find_dynamic_temperature(x, temperature, extras, rows)
