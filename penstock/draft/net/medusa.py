"""Medusa heads: each a few residual layers and the vocabulary, on the target's last hidden state."""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.decoder import CPU, Decoder, dense
from penstock.models.files import Checkpoint
from penstock.quant.scheme import Scheme

# vLLM's names, and those of the authors' own ModuleList, with the head's and the layer's number
LAYERS = (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"(\d+)\.(\d+)\.linear\.(weight|bias)")
ROWS = (r"lm_heads\.(\d+)\.weight", r"(\d+)\.(\d+)\.weight")
PREFIXES = ("medusa_heads.", "medusa_head.")


class MedusaHeads:
    name = "medusa"

    def __init__(
        self, checkpoint: Checkpoint, target: Decoder, dtype: torch.dtype | None, device: torch.device = CPU
    ) -> None:
        self.ops, self._checkpoint, self._dtype, self._device = target.ops, checkpoint, dtype, device
        self._width, self._vocab_size = target.spec.width, target.spec.vocab_size
        names = {self._strip(name): name for name in checkpoint.names()}
        layers: dict[tuple[int, int], dict[str, str]] = {}
        rows: dict[int, str] = {}
        for spelled, name in names.items():
            if found := _match(LAYERS, spelled):
                layers.setdefault((int(found[1]), int(found[2])), {})[found[3]] = name
            elif found := _match(ROWS, spelled):
                rows[int(found[1])] = name
            elif spelled != "token_map":
                raise InvalidModel(
                    f"{checkpoint.path}: tensor {name!r} is unknown to Medusa: it is another kind of file"
                )
        self.num_heads = len(rows)
        if not rows or sorted(rows) != list(range(len(rows))) or {head for head, _ in layers} - rows.keys():
            raise InvalidModel(f"{checkpoint.path}: Medusa heads {sorted(rows)} are not numbered from 0 without a gap")
        self.target_ids = self._read_ids(names.get("token_map"))
        num_rows = self._vocab_size if self.target_ids is None else len(self.target_ids)
        self._layers = [
            [self._hold(parts, self._width) for (owner, _), parts in sorted(layers.items()) if owner == head]
            for head in range(self.num_heads)
        ]
        self._rows = [self._hold({"weight": rows[head]}, num_rows) for head in range(self.num_heads)]

    @staticmethod
    def _strip(name: str) -> str:
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        return name

    def _hold(self, parts: dict[str, str], num_out: int) -> Scheme:
        """Store a matrix of the checkpoint, with its bias if it has one."""
        if "weight" not in parts:
            raise InvalidModel(f"{self._checkpoint.path}: {parts['bias']!r} has no weight beside it")
        weight = self._checkpoint.tensor(parts["weight"])
        if tuple(weight.shape) != (num_out, self._width):
            raise InvalidModel(
                f"{self._checkpoint.path}: tensor {parts['weight']!r} has shape {list(weight.shape)}, this model needs "
                f"{[num_out, self._width]}: give the heads that were trained for it"
            )
        bias = self._checkpoint.tensor(parts["bias"]).float().to(self._device) if "bias" in parts else None
        return dense(self.ops, weight.to(self._device, self._dtype or weight.dtype), bias)

    def _read_ids(self, name: str | None) -> np.ndarray | None:
        if name is None:
            return None
        ids: np.ndarray = self._checkpoint.tensor(name).to(torch.int64).numpy()
        if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InvalidModel(f"{self._checkpoint.path}: token_map is no list of ids below {self._vocab_size}")
        return ids

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        x = hidden
        for layer in self._layers[head]:
            x = self.ops.add(x, self.ops.activation(layer.matmul(x), "silu"))
        return self._rows[head].matmul(x)


def _match(patterns: tuple[str, ...], name: str) -> re.Match[str] | None:
    return next((found for pattern in patterns if (found := re.fullmatch(pattern, name))), None)
