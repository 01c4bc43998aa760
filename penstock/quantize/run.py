"""Make a model of another, block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.multimodal import is_multimodal
from penstock.quantize.block import BlockRounder, Pieces, RoundedBlock
from penstock.quantize.compressed.output import FolderOutput
from penstock.quantize.gguf.output import GgufOutput, check_path
from penstock.quantize.job import Job
from penstock.quantize.layout import is_kept
from penstock.quantize.targets import Target, choose_group
from penstock.quantize.walk import LayerStack, Walk, split_windows

WINDOW = 512
MIN_TOKENS = 64
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ModelWriter(Protocol):
    """A format being written."""

    def pieces(self) -> Pieces: ...

    def layer(self, index: int, block: RoundedBlock) -> dict[str, Tensor]: ...

    def outer(self) -> dict[str, Tensor]: ...

    def facts(self, names: dict[str, Tensor]) -> dict[str, Any]: ...

    def publish(self, job: Job, num_parts: int) -> None: ...


Progress = Callable[[int, int], None]  # blocks done, blocks in all


@dataclass(frozen=True)
class Made:
    """The result of a run."""

    out: Path
    target: Target
    num_tokens: int  # of the calibration text
    resumed_from: int  # blocks that an earlier run had finished
    errors: dict[str, float]  # linear → relative error of its outputs


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    target: Target,
    tokens: Sequence[int] | None,
    *,
    group_size: int | None = None,
    sample: str = "",
    progress: Progress = lambda done, total: None,
) -> Made:
    """Write what `target` says of a model to `out`; `tokens` are the calibration text's, None: weights alone.

    `sample` is text that a tokenizer made for the output must split like the model's own.
    """
    _require_tokens(target, tokens)
    if target.kind == "gguf":
        check_path(out)
    if is_multimodal(checkpoint.config):
        raise InvalidModel(
            f"{checkpoint.path}: {checkpoint.config['architectures'][0]} is multimodal, and only its text part is "
            "read, so the output would lack the weights that encode media: quantize a text model"
        )
    stack = LayerStack(checkpoint, WINDOW)
    widths = {
        source.shape[1]
        for name, parts in stack.sources.items()
        for source in parts
        if name.startswith("layers.") and len(source.shape) == 2 and not is_kept(name)
    }
    target = replace(target, group=choose_group(target, widths, group_size))
    dtype = _dtype(checkpoint)
    output: ModelWriter = (
        GgufOutput(stack, target, dtype, sample) if target.kind == "gguf" else FolderOutput(stack, target, dtype)
    )
    windows = None if tokens is None else split_windows(tokens, min(WINDOW, stack.spec.max_positions))
    facts = _facts(checkpoint, target, tokens)
    with Job(out, facts).open() as job, torch.inference_mode():
        return _work(stack, output, target, dtype, windows, job, progress)


def _work(
    stack: LayerStack,
    output: ModelWriter,
    target: Target,
    dtype: torch.dtype,
    windows: list[list[int]] | None,
    job: Job,
    progress: Progress,
) -> Made:
    total = stack.spec.num_layers + 1
    begun = job.count_finished(total)
    walk = None if windows is None else Walk(windows)
    if begun == 0:
        tensors = output.outer()
        x = walk.embed(stack.ends()[0]) if walk else None
        job.finish(0, tensors, output.facts(tensors), x)
    first = max(begun, 1)
    x = job.inputs(first) if first < total else None
    rounder = BlockRounder(stack, target, dtype, output.pieces())
    progress(first - 1, total - 1)
    for number in range(first, total):
        block, x = rounder.round(number - 1, walk, x)
        tensors = output.layer(number - 1, block)
        job.finish(number, tensors, output.facts(tensors) | {"errors": block.errors}, x)
        progress(number, total - 1)
    errors = {key: value for number in range(1, total) for key, value in job.part_facts(number)["errors"].items()}
    output.publish(job, total)
    return Made(job.out, target, walk.num_tokens if walk else 0, max(0, begun - 1), errors)


def _require_tokens(target: Target, tokens: Sequence[int] | None) -> None:
    if tokens is None:
        if target.method in ("gptq", "awq", "smoothquant"):
            raise InvalidConfig(f"method={target.method} needs a calibration text: leave out --calibration none")
        if target.sparsity != "none" and target.prune != "magnitude":
            raise InvalidConfig(f"prune={target.prune} needs a calibration text: leave out --calibration none")
    elif len(tokens) < MIN_TOKENS:
        raise InvalidConfig(
            f"the calibration text has {len(tokens)} tokens, {MIN_TOKENS} or more are needed: give a longer one, or "
            "none for the bundled one"
        )


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of what stays unrounded: the checkpoint's own where it is 16 bits wide."""
    named = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "")
    return FLOATS["float16"] if named == "float16" else FLOATS["bfloat16"]


def _facts(checkpoint: Checkpoint, target: Target, tokens: Sequence[int] | None) -> dict[str, Any]:
    """Say what is made of what, so that another run does not go on with it."""
    text = "none" if tokens is None else hashlib.sha256(str(list(tokens)).encode()).hexdigest()[:16]
    model = f"{checkpoint.path.resolve()}, {checkpoint.num_bytes} bytes"
    return {"model": model, "calibration": text, **vars(target)}
