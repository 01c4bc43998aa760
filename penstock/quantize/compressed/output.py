"""Collect a model's tensors under the checkpoint's names, and write the folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.quantize.block import Pieces, RoundedBlock
from penstock.quantize.compressed.folder import copy_text, write_config, write_weights
from penstock.quantize.compressed.pack import describe, pack_matrix
from penstock.quantize.job import Job
from penstock.quantize.layout import cut_rows, restore, row_order
from penstock.quantize.targets import Target
from penstock.quantize.walk import LayerStack


class FolderOutput:
    """Tensors of a model folder."""

    def __init__(self, stack: LayerStack, target: Target, dtype: torch.dtype) -> None:
        self.stack, self.target, self.dtype = stack, target, dtype
        for parameter, sources in stack.sources.items():
            is_matrix = parameter.startswith("layers.") and len(sources[0].shape) == 2
            if is_matrix and target.kind != "dense" and any(source.layout == "transposed" for source in sources):
                raise InvalidModel(
                    f"{stack.checkpoint.path}: tensor {sources[0].tensor!r} is stored transposed, which the "
                    "compressed-tensors format cannot say: choose a gguf: scheme or bf16"
                )

    def pieces(self) -> Pieces:
        return {}

    def layer(self, index: int, block: RoundedBlock) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for inner, value in block.params.items():
            parameter = f"layers.{index}.{inner}"
            rounded = block.matrices.get(parameter)
            for source, rows in cut_rows(self.stack.sources, parameter):
                if rounded is None or rounded.grid is None or rounded.codes is None:
                    made[source.tensor] = restore(value[rows], source).to(self.dtype)
                    continue
                codes, grid, order = rounded.codes[rows], rounded.grid.rows(rows), row_order(source)
                if order is not None:
                    codes, grid = codes[order], grid.rows(order)
                made |= pack_matrix(source.tensor, codes, grid, self.target, self.dtype)
        return made

    def outer(self) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for parameter in self.stack.outer():
            value = self.stack.take(parameter)
            for source, rows in cut_rows(self.stack.sources, parameter):
                made[source.tensor] = restore(value[rows], source).to(self.dtype)
        return made

    def facts(self, names: dict[str, Tensor]) -> dict[str, Any]:
        return {}

    def publish(self, job: Job, num_parts: int) -> None:
        folder = job.folder / "output"
        folder.mkdir(exist_ok=True)
        write_weights(job, num_parts, folder)
        copy_text(self.stack.checkpoint, folder)
        quantization = None if self.target.kind == "dense" else describe(self.target, self._find_dense())
        write_config(folder, self.stack.checkpoint.config, self.dtype, quantization)
        job.publish(folder)

    def _find_dense(self) -> list[str]:
        """Name the linear modules that stay in 16 bits: the head, whose tensor may be the embedding's."""
        heads = [name for name in self.stack.sources if name.startswith("head.") and name.endswith(".weight")]
        found = [source.tensor.rpartition(".")[0] for name in heads for source in self.stack.sources[name]]
        return sorted({"lm_head", *found})
