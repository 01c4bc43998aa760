"""Log probabilities of chosen tokens and of the likeliest ones, from raw logits on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op
from penstock.ops.sampling.row_params import MAX_LOGPROBS, NUM_LOGPROBS

NUM_REPORTED = 2 + 2 * MAX_LOGPROBS  # log probability, rank; tokens; their log probabilities
LIST_END = -1


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 2e-5})
def report(
    logits: Tensor, tokens: Tensor, rows: Tensor, numbers: Tensor, room: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return log probabilities of each row of logits[S, V] that asks in numbers[rows, NUM_LOGPROBS].

    A row of the result [S, NUM_REPORTED] float32 holds the log probability of tokens[s], its rank from 1, and the
    likeliest tokens, as many as asked for, of equals the lowest id first, with LIST_END after them. Other rows are
    undefined. `room` is scratch memory, [R, MAX_CANDIDATES] of float32 and of int32.
    """
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
    order = x.sort(dim=-1, descending=True, stable=True).indices[:, :MAX_LOGPROBS]
    count = order.shape[1]
    listed = torch.arange(count, device=x.device) < numbers[rows.long(), NUM_LOGPROBS, None] - 1
    ids, found = out[:, 2 : 2 + MAX_LOGPROBS], out[:, 2 + MAX_LOGPROBS :]
    ids.fill_(LIST_END)
    ids[:, :count] = torch.where(listed, order.float(), float(LIST_END))
    found[:, :count] = torch.where(listed, values.gather(-1, order), 0.0)
    out[numbers[rows.long(), NUM_LOGPROBS] <= 0] = 0
    return out
