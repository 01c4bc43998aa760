"""Put a finished model's folder together: shards with their index, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.safetensors import INDEX, read_header
from penstock.models.files.write_safetensors import write_stream
from penstock.quantize.job import Job

SHARD_BYTES = 4 << 30
# files of a model's folder that are not weights, and that a copy needs
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
)
Described = tuple[str, torch.dtype, tuple[int, ...]]


def write_weights(job: Job, num_parts: int, folder: Path) -> None:
    """Write the tensors of all parts as one file, or as shards with an index."""
    shards: list[list[tuple[int, Described]]] = [[]]
    held = total = 0
    for number in range(num_parts):
        for name, entry in read_header(job.part(number)).items():
            size = entry.end - entry.begin
            if held and held + size > SHARD_BYTES:
                shards.append([])
                held = 0
            shards[-1].append((number, (name, getattr(torch, entry.dtype), entry.shape)))
            held, total = held + size, total + size
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        weight_map |= {described[0]: file for _, described in shard}
        write_stream(folder / file, [described for _, described in shard], _read(job, shard), {"format": "pt"})
    if len(shards) > 1:
        index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index_file, indent=2) + "\n")


def _read(job: Job, shard: list[tuple[int, Described]]) -> Iterator[Tensor]:
    opened, file = -1, None
    for number, (name, _, _) in shard:
        if number != opened:
            opened, file = number, job.read(number)
        assert file is not None
        yield file.get_tensor(name)


def write_config(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, quantization: object | None) -> None:
    """Write config.json, which makes the folder a model: last of all."""
    named = {name: value for name, value in config.items() if name not in ("torch_dtype", "quantization_config")}
    named["dtype"] = named["torch_dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        named["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(named, indent=2) + "\n")


def copy_text(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer and what belongs to it, or make them of a GGUF file's metadata."""
    source = checkpoint.tokenizer_source()
    if isinstance(source, Path):
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    from penstock.text.tokenizers.gguf import read_vocabulary
    from penstock.text.tokenizers.write_folder import write_tokenizer

    write_tokenizer(read_vocabulary(source, str(checkpoint.path)), folder)
    if checkpoint.generation_config:
        (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2) + "\n")
