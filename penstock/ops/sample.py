"""Choosing a token of each row of logits on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops import extras as samplers
from penstock.ops.example import integers, normal, permutation
from penstock.ops.extras import Extras
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow
from penstock.ops.wishes import Wishes, counted, edited, kept

BAD = -1  # in place of a token where logits are no numbers
NOTHING = -2  # where a mask leaves no token
PIECE = 4096  # tokens under one sum
GOLDEN = 0x9E3779B9
_WORD = (1 << 32) - 1


class _Sampled(EachRow):
    """temperature and keys are of the rows, or of entries that the rows name."""

    def take(self, example: Example, keep: list[int]) -> Example:
        own = ("rows",) if example.get("rows") is not None else ("temperature", "keys")
        return super().take(example, keep) | {name: example[name][keep] for name in own}


def _examples() -> Iterator[Example]:
    for seed, (num_rows, size) in enumerate([(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000), (4, 20000)]):
        rows = torch.arange(num_rows)
        yield {
            "logits": normal(seed, num_rows, size, scale=3.0),
            "temperature": (rows % 3) * 0.5,
            "keys": (rows + 1) * 0x9E3779B97F4A7C15 % (1 << 62),
            "positions": rows * 7 + seed,
        }
        if num_rows > 1:
            yield {
                "logits": normal(seed, num_rows, size),
                "temperature": torch.linspace(0, 2, 9),
                "keys": integers(seed, 1 << 40, 9),
                "positions": rows,
                "rows": permutation(seed, 9)[:num_rows],
                "last": torch.zeros(9, dtype=torch.int64),
            }
    broken = normal(9, 5, 5000)
    broken[1, 4000], broken[2, 7], broken[3] = torch.nan, torch.inf, -torch.inf
    yield {
        "logits": broken,
        "temperature": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]),
        "keys": torch.arange(5),
        "positions": torch.arange(5),
    }
    few = torch.full((6, 9000), -torch.inf)
    few[:, [5, 4095, 8999]] = 1.0
    yield {"logits": few, "temperature": torch.ones(6), "keys": torch.arange(6), "positions": torch.arange(6)}


def mixed(x: Tensor) -> Tensor:
    """32-bit numbers, in int64, with every bit of x spread over them."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def shares(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers in [0, 1) for each of keys[S] and positions[S]."""
    place = positions.to(torch.int64)
    first = mixed((keys & _WORD) ^ mixed(place))
    second = mixed(mixed((keys >> 32) ^ mixed(place + GOLDEN)) ^ first)
    return (first >> 8).float() * 2.0**-24, (second >> 8).float() * 2.0**-24


def chances(keys: Tensor, positions: Tensor) -> Tensor:
    """A third number in [0, 1) for each of keys[S] and positions[S]."""
    place = positions.to(torch.int64)
    third = mixed(mixed((keys >> 32) ^ mixed(place + 2 * GOLDEN)) ^ mixed(keys & _WORD))
    return (third >> 8).float() * 2.0**-24


def _crossing(weights: Tensor, share: Tensor) -> Tensor:
    """The first place of weights[S, n] at which their running sum exceeds that share of the whole."""
    sums = weights.cumsum(-1)
    whole = sums[:, -1:]
    return torch.minimum((sums <= share[:, None] * whole).sum(-1), (sums < whole).sum(-1))


@op(tolerance={torch.float32: 0.0}, examples=_examples, rows=_Sampled("logits", "positions"))
def sample(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    last: Tensor | None = None,
    wishes: Wishes | None = None,
    extras: Extras | None = None,
) -> Tensor:
    """A token of each row of logits[S, V], with the probabilities softmax(logits / temperature); the first likeliest
    where temperature[S] is 0 → [S] int64. What is drawn follows from the row's key and position alone: first a piece
    of the vocabulary, then a token of it.

    With rows[S], a row's temperature and key are those of its entry rows[s], and its token is entered into last[rows]
    too; with wishes, what its entry wishes is done first, and the token counted there where the row has penalties, and
    with extras what its samplers ask, which need wishes. A row with a NaN, or without a finite largest logit, gets BAD,
    and one whose mask leaves nothing NOTHING.
    """
    if rows is not None:
        temperature, keys = temperature[rows], keys[rows]
    num_rows, size = logits.shape
    raw_top = logits.float().amax(-1)
    x = logits.float()
    heat = temperature
    if wishes is not None and rows is not None:
        x, heat = _left(logits, temperature, keys, positions, rows, wishes, extras)
    drawn_from = x
    x = torch.nn.functional.pad(x, (0, -size % PIECE), value=-torch.inf)
    heat = torch.where(heat > 0, heat, 1.0)[:, None]
    top = x.amax(-1, keepdim=True)
    weights = torch.exp((x - top) / heat).view(num_rows, x.shape[1] // PIECE, PIECE)
    pieces, tokens = shares(keys, positions)
    piece = _crossing(weights.sum(-1), pieces)
    within = weights[torch.arange(num_rows), piece.clamp(max=weights.shape[1] - 1)]
    drawn = piece * PIECE + _crossing(within, tokens)
    chosen = torch.where(temperature > 0, drawn, x.argmax(-1))
    chosen = torch.where(top[:, 0] == -torch.inf, NOTHING, chosen)
    chosen = torch.where(logits.isnan().any(-1) | ~raw_top.isfinite(), BAD, chosen)
    if rows is not None and last is not None:
        last[rows] = chosen
    if rows is not None and wishes is not None:
        counted(wishes, rows[chosen >= 0], chosen[chosen >= 0])
        if extras is not None:
            heat = torch.where(temperature > 0, heat[:, 0], 0.0)
            samplers.update_samplers(drawn_from, heat, wishes, extras, rows, positions, chosen)
    return chosen


def _left(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor,
    wishes: Wishes,
    extras: Extras | None,
) -> tuple[Tensor, Tensor]:
    """The logits that may be drawn, and the temperatures to draw with."""
    x = edited(logits, wishes, rows)
    if extras is None:
        return kept(x, temperature, wishes, rows), temperature
    x = samplers.apply_top_n_sigma(samplers.apply_dry(x, extras, rows, positions), extras, rows)
    samplers.set_mirostat_cut(x, temperature, wishes, extras, rows)
    is_dynamic = extras.numbers[rows, samplers.DYNATEMP_RANGE] > 0
    heat = torch.where(is_dynamic & (temperature > 0), 1.0, temperature)
    x = samplers.apply_xtc(kept(x, heat, wishes, rows), heat, chances(keys, positions), extras, rows)
    return x, samplers.find_dynamic_temperature(x, temperature, extras, rows)
