"""Choosing a token of each row of logits on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers, normal, permutation
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow

BAD = -1                   # in place of a token where logits are no numbers
_WORD = (1 << 32) - 1


class _Sampled(EachRow):
    """temperature and keys are of the rows, or of entries that the rows name."""

    def take(self, example: Example, keep: list[int]) -> Example:
        own = ("rows",) if example.get("rows") is not None else ("temperature", "keys")
        return super().take(example, keep) | {name: example[name][keep] for name in own}


def _examples() -> Iterator[Example]:
    for seed, (num_rows, size) in enumerate([(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000), (4, 20000)]):
        rows = torch.arange(num_rows)
        yield {"logits": normal(seed, num_rows, size, scale=3.0), "temperature": (rows % 3) * 0.5,
               "keys": (rows + 1) * 0x9E3779B97F4A7C15 % (1 << 62), "positions": rows * 7 + seed}
        if num_rows > 1:
            yield {"logits": normal(seed, num_rows, size), "temperature": torch.linspace(0, 2, 9),
                   "keys": integers(seed, 1 << 40, 9), "positions": rows, "rows": permutation(seed, 9)[:num_rows],
                   "last": torch.zeros(9, dtype=torch.int64)}
    broken = normal(9, 5, 5000)
    broken[1, 4000], broken[2, 7], broken[3] = torch.nan, torch.inf, -torch.inf
    yield {"logits": broken, "temperature": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]), "keys": torch.arange(5),
           "positions": torch.arange(5)}


def mixed(x: Tensor) -> Tensor:
    """32-bit numbers, in int64, with every bit of x spread over them."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def waits(keys: Tensor, positions: Tensor, size: int) -> Tensor:
    """Draws [S, V] of a standard exponential distribution for keys[S] and positions[S]."""
    first = mixed((keys & _WORD) ^ mixed(positions.to(torch.int64)))
    second = mixed((keys >> 32) ^ mixed(positions.to(torch.int64) + 0x9E3779B9))
    tokens = torch.arange(size, device=keys.device)
    bits = mixed(mixed(tokens ^ first[:, None]) ^ second[:, None])
    share = (bits.float() + 0.5) * 2.0**-32
    return -torch.log1p(-share.clamp(max=1 - 2.0**-24))


@op(tolerance={torch.float32: 0.0}, examples=_examples, rows=_Sampled("logits", "positions"))
def sample(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, rows: Tensor | None = None,
           last: Tensor | None = None) -> Tensor:
    """A token of each row of logits[S, V], with the probabilities softmax(logits / temperature); the first likeliest
    where temperature[S] is 0 → [S] int64. What is drawn follows from the row's key and position alone.

    With rows[S], a row's temperature and key are those of its entry rows[s], and its token is entered into last[rows]
    too. It is the token whose wait is over first, waits being exponential with the tokens' weights as rates. A row with
    a NaN, or without a finite largest logit, gets BAD.
    """
    if rows is not None:
        temperature, keys = temperature[rows], keys[rows]
    x = logits.float()
    noisy = x / torch.where(temperature > 0, temperature, 1.0)[:, None] - waits(keys, positions, x.shape[1]).log()
    tokens = torch.where(temperature > 0, noisy.argmax(-1), x.argmax(-1))
    bad = x.isnan().any(-1) | ~x.amax(-1).isfinite()
    tokens = torch.where(bad, BAD, tokens)
    if rows is not None and last is not None:
        last[rows] = tokens
    return tokens
