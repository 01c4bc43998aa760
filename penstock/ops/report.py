"""Log probabilities of chosen tokens and of the likeliest ones, from raw logits on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers, normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow
from penstock.ops.wishes import MOST_LOGPROBS, NUM_LOGPROBS, NUM_WISHES

NUM_REPORTED = 2 + 2 * MOST_LOGPROBS  # log probability, rank; tokens; their log probabilities
NO_TOKEN = -1


class _Reported(EachRow):
    def take(self, example: Example, keep: list[int]) -> Example:
        return super().take(example, keep) | {"rows": example["rows"][keep]}


def _examples() -> Iterator[Example]:
    for seed, (num_rows, size) in enumerate([(0, 8), (3, 1), (4, 40), (5, 5000), (3, 40_000)]):
        numbers = torch.zeros((7, NUM_WISHES))
        numbers[:, NUM_LOGPROBS] = torch.tensor([1.0, 0.0, 6.0, 21.0, MOST_LOGPROBS + 1.0, 2.0, 3.0])
        for dtype in (torch.float32, torch.bfloat16):
            yield {
                "logits": normal(seed, num_rows, size, scale=3.0).to(dtype),
                "tokens": integers(seed, size, num_rows).long(),
                "rows": torch.tensor([4, 1, 2, 3, 0, 5, 6])[:num_rows],
                "numbers": numbers,
            }


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 2e-5}, examples=_examples, rows=_Reported("logits", "tokens"))
def report(
    logits: Tensor, tokens: Tensor, rows: Tensor, numbers: Tensor, room: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Of each row of logits[S, V] that asks for it in numbers[rows, NUM_LOGPROBS]: the log probability of tokens[s],
    its place among all from 1, and as many of the likeliest as are asked for, likeliest first, of equals the lowest id
    → [S, NUM_REPORTED] float32, with NO_TOKEN where a list ends. Rows that ask for nothing hold nothing of use.
    `room` is memory to work in, [R, ROOM] of float32 and of int32."""
    num_rows, size = logits.shape
    out = torch.zeros((num_rows, NUM_REPORTED), device=logits.device)
    if not num_rows:
        return out
    x = logits.float()
    values = x.log_softmax(-1)
    chosen = tokens.clamp(min=0)[:, None]
    mine = x.gather(-1, chosen)
    token = torch.arange(size, device=x.device)
    out[:, :1] = values.gather(-1, chosen)
    out[:, 1] = 1 + ((x > mine) | (x == mine) & (token < chosen)).sum(-1)
    order = x.sort(dim=-1, descending=True, stable=True).indices[:, :MOST_LOGPROBS]
    count = order.shape[1]
    listed = torch.arange(count, device=x.device) < numbers[rows.long(), NUM_LOGPROBS, None] - 1
    ids, found = out[:, 2 : 2 + MOST_LOGPROBS], out[:, 2 + MOST_LOGPROBS :]
    ids.fill_(NO_TOKEN)
    ids[:, :count] = torch.where(listed, order.float(), float(NO_TOKEN))
    found[:, :count] = torch.where(listed, values.gather(-1, order), 0.0)
    out[numbers[rows.long(), NUM_LOGPROBS] <= 0] = 0
    return out
