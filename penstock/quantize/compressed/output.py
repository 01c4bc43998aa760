"""Collect a model's tensors under the checkpoint's names, and write the folder."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.reading import STACKS, Source
from penstock.quantize.block import Pieces, RoundedBlock
from penstock.quantize.compressed.folder import copy_text, write_config, write_weights
from penstock.quantize.compressed.pack import describe, is_sparse, pack_matrix, pack_sparse
from penstock.quantize.job import Job
from penstock.quantize.layout import cut_rows, is_kept, restore, row_order
from penstock.quantize.targets import Target
from penstock.quantize.walk import LayerStack

ROWS = ("plain", "grouped")  # layouts whose rows are outputs


class FolderOutput:
    """Tensors of a model folder."""

    def __init__(self, stack: LayerStack, target: Target, dtype: torch.dtype) -> None:
        self.stack, self.target, self.dtype = stack, target, dtype
        self.merges = stack.spec.merges()
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
            for source, rows in self._cut(parameter):
                if rounded is None or rounded.grid is None or rounded.codes is None:
                    plain = restore(value[rows], source).to(self.dtype)
                    packs = rounded is not None and is_sparse(self.target) and source.layout in ROWS
                    made |= pack_sparse(source.tensor, plain) if packs else {source.tensor: plain}
                    continue
                codes, grid, order = rounded.codes[rows], rounded.grid.rows(rows), row_order(source)
                if order is not None:
                    codes, grid = codes[order], grid.rows(order)
                made |= pack_matrix(source.tensor, codes, grid, self.target, self.dtype)
        return made

    def _cut(self, parameter: str) -> Iterator[tuple[Source, slice]]:
        """Yield tensors and rows: a stack's matrices one by one, where the format has no stacks or files cut it."""
        sources = self.stack.sources[parameter]
        is_stacked = sources[0].layout in STACKS and self.target.kind != "dense"
        merge = self.merges.get(parameter.rpartition(".")[0])
        if merge is None or not (is_stacked or sources[0].rows is not None):
            yield from cut_rows(self.stack.sources, parameter)
            return
        first, shape = 0, sources[0].shape[1:]
        for name, height in merge.parts:
            source = Source(self._spell(parameter, name, sources[0].tensor), "plain", (height, *shape))
            yield source, slice(first, first + height)
            first += height

    def _spell(self, parameter: str, part: str, beside: str) -> str:
        """Name a part of a parameter as checkpoints of the family do, with the prefix of the tensor beside it."""
        module, _, kind = parameter.rpartition(".")
        above, names = module.rpartition(".")[0], self.stack.spec.names
        number, expert = parameter.split(".")[1], part.partition(".")[0]
        prefix = max((each for each in names.prefixes if beside.startswith(each)), key=len, default="")
        spelled = [
            f"{prefix}{names.stack}.{number}.{name.replace('*', expert)}.{kind}" for name in names.layer if "*" in name
        ]
        found = [(name, names.find(name)) for name in spelled]
        same = [name for name, stored in found if stored is not None and stored.name == f"{above}.{part}.{kind}"]
        if not same:
            raise InvalidModel(
                f"{self.stack.checkpoint.path}: tensor {beside!r} holds several matrices, which this format stores one "
                "by one, and the family has no names for them: choose a gguf: scheme or bf16"
            )
        near = "" if self.stack.checkpoint.format == "gguf" else beside  # whose names are other than the family's
        return max(same, key=lambda name: len(commonprefix([name, near])))

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
        quantization = describe(self.target, self._find_dense())
        write_config(folder, self.stack.checkpoint.config, self.dtype, quantization)
        job.publish(folder)

    def _find_dense(self) -> list[str]:
        """Name the linear modules that stay in 16 bits: the head, whose tensor may be the embedding's, and routers."""
        names = [name for name in self.stack.sources if name.endswith(".weight")]
        heads = [name for name in names if name.startswith("head.") or is_kept(name)]
        found = [source.tensor.rpartition(".")[0] for name in heads for source in self.stack.sources[name]]
        return sorted({"lm_head", *found})
