"""Calls of the ops as a decoder makes them, and what each must move and compute at least."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from bench.op_attention import Attention
from bench.op_inputs import EPS, OpCase, Shape
from bench.op_products import Products
from penstock import ops

SHAPES = {
    "8b": Shape("8b", 4096, 14336, 32, 8, 128, 128256),
    "0.6b": Shape("0.6b", 1024, 3072, 16, 8, 128, 151936, normed=True),
}


class Maker(Attention, Products):
    """The cases of one shape on one device."""

    def rms_norm(self) -> Iterator[OpCase]:
        width = self.shape.width
        weight = self._normal(width)
        own = weight.float()
        for rows in self.sizes.rows:
            xs = self._wide(rows, width)
            yield OpCase(
                "rms_norm",
                self.shape.name,
                f"{rows} rows",
                [partial(ops.rms_norm, x, own, EPS) for x in xs],
                4.0 * rows * width,
                others={"torch": [partial(F.rms_norm, x, (width,), weight, EPS) for x in xs]},
            )

    def activation(self) -> Iterator[OpCase]:
        hidden = self.shape.hidden
        for rows in self.sizes.rows:
            xs = self._wide(rows, 2 * hidden)
            yield OpCase(
                "activation",
                self.shape.name,
                f"{rows} rows",
                [partial(ops.gated_activation, x, "silu") for x in xs],
                6.0 * rows * hidden,
            )

    def sample(self) -> Iterator[OpCase]:
        size = self.shape.vocab_size
        for rows in self.sizes.sampled:
            heat = torch.ones(rows, device=self.device)
            keys = torch.randint(1 << 60, (rows,), device=self.device)
            places = torch.arange(rows, device=self.device)
            yield OpCase(
                "sample",
                self.shape.name,
                f"{rows} × {size}",
                [partial(ops.sample, logits, heat, keys, places) for logits in self._wide(rows, size)],
                2.0 * rows * size,
            )
