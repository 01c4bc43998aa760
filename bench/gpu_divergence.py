"""What quantizing costs: the same tokens through a model in 16 bits and through the same weights quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import ops
from penstock.cache.group import LAYOUTS, group_layers
from penstock.models.decoder import Decoder
from penstock.models.files import read_config
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.passes.load import load_lowered
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step

BLOCK = 16
SEQUENCES, LENGTH, SINGLES = 8, 512, 64  # of LENGTH tokens the last SINGLES one at a time
ROWS = 128  # of logits at once


class Reader:
    """A decoder with a cache of its own, fed with the same number of tokens of each sequence."""

    def __init__(self, model: Decoder, kv_dtype: str, num_sequences: int, length: int, device: torch.device) -> None:
        grouping = group_layers(model.spec.states(LAYOUTS[kv_dtype]), BLOCK)
        if len(grouping.groups) != 1:
            raise ValueError(
                f"{model.spec.architecture} keeps {len(grouping.groups)} kinds of state; only models with "
                "one are measured"
            )
        width = -(-length // BLOCK)
        memory = BlockMemory(num_sequences * width, BLOCK, grouping, kv_dtype, device)
        self.model, self.device = model, device
        self._caches = memory.views(model.spec.memories())
        self._table = torch.arange(num_sequences * width, dtype=torch.int32, device=device).view(num_sequences, width)

    def hidden(self, ids: Tensor, start: int) -> Tensor:
        """ids[S, n] at positions start … start + n - 1 → [S · n, C]."""
        count, each = ids.shape
        place = torch.arange(start, start + each, device=self.device)
        slots = (self._table[:count, place // BLOCK].long() * BLOCK + place % BLOCK).reshape(-1)
        starts = torch.arange(count + 1, dtype=torch.int32, device=self.device) * each
        lengths = torch.full((count,), start + each, dtype=torch.int32, device=self.device)
        work = ops.Work(count, None, 1) if each == 1 else None
        step = Step(
            ids.reshape(-1), place.repeat(count), [slots], [self._table[:count].contiguous()], starts, lengths, work
        )
        return self.model.forward(step, self._caches)


class Sums:
    """KL in nats from the first model's distribution to the second's, and how often both have the same favourite."""

    def __init__(self) -> None:
        self.count = self.same = 0
        self.total = self.most = 0.0

    def add(self, first: Tensor, second: Tensor) -> None:
        p, q = (torch.log_softmax(logits.float(), -1) for logits in (first, second))
        apart = (p.exp() * (p - q)).sum(-1)
        self.count += len(apart)
        self.total += float(apart.sum())
        self.most = max(self.most, float(apart.max()))
        self.same += int((p.argmax(-1) == q.argmax(-1)).sum())

    def figures(self) -> dict[str, float]:
        return {
            "kl_mean": round(self.total / self.count, 6),
            "kl_max": round(self.most, 5),
            "top1_same": round(self.same / self.count, 4),
            "positions": self.count,
        }


def compare(first: Reader, second: Reader, ids: Tensor, singles: int = SINGLES) -> dict[str, Any]:
    """Whole prompts in one step, then tokens one at a time, of all sequences together and of the first alone: each
    takes other kernels."""
    cut = ids.shape[1] - singles
    found = {"prompt": Sums(), "together": Sums(), "alone": Sums()}
    with torch.inference_mode():
        for way, some, positions in [
            ("prompt", ids[:, :cut], [0]),
            ("together", ids[:, cut:], range(cut, ids.shape[1])),
            ("alone", ids[:1, cut:], range(cut, ids.shape[1])),
        ]:
            for at, position in enumerate(positions):
                part = some if way == "prompt" else some[:, at : at + 1]
                a, b = first.hidden(part, position), second.hidden(part, position)
                for row in range(0, len(a), ROWS):
                    found[way].add(first.model.logits(a[row : row + ROWS]), second.model.logits(b[row : row + ROWS]))
    return {way: sums.figures() for way, sums in found.items()}


def divergence(
    folder: str,
    quantization: str | None,
    kv_cache_dtype: str | None,
    dtype: str,
    device: str,
    num_sequences: int = SEQUENCES,
    length: int = LENGTH,
    singles: int = SINGLES,
) -> dict[str, Any]:
    """Random weights of the folder's config, random tokens."""
    where, kind = torch.device(device), getattr(torch, dtype)
    if device == "cuda":
        import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
    spec: ModelSpec = spec_from_config(read_config(Path(folder)), length)
    readers = []
    for quantized, kept in ((None, dtype), (quantization, kv_cache_dtype or dtype)):
        model = load_lowered(None, spec, dtype=kind, quantization=quantized, dummy_seed=0, device=where)
        assert isinstance(model, Decoder)
        readers.append(Reader(model, kept, num_sequences, length, where))
    ids = torch.randint(spec.vocab_size, (num_sequences, length), generator=torch.Generator().manual_seed(7)).to(where)
    return compare(readers[0], readers[1], ids, singles)
