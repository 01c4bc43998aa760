"""The model files that are measured, made once into a folder outside the repository.

A file is a GGUF that Penstock and llama.cpp read as it is; a folder is the same weights as safetensors, for engines
that read no GGUF. Both come from the models that `penstock pull` fetches, or from seeded random numbers.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import gguf_file

Progress = Callable[[str, int, int], None]  # what is being made, bytes done, bytes in all


@dataclass(frozen=True)
class ModelFile:
    name: str
    model: str
    quantization: str  # how every matrix is stored; "" for a file as it was published


FILES = {
    file.name: file
    for file in (
        ModelFile("smollm2-q4_1", "smollm2", ""),
        ModelFile("smollm2-q8_0", "smollm2", "Q8_0"),
        ModelFile("smollm2-f16", "smollm2", "F16"),
        ModelFile("gemma3-270m-q4_k_m", "gemma3-270m", ""),
        ModelFile("llama-1b-q4_0", "llama-1b", "Q4_0"),
        ModelFile("llama-1b-q8_0", "llama-1b", "Q8_0"),
        ModelFile("smollm2-q4_0", "smollm2", "Q4_0"),
    )
}
DEFAULT_FILES = tuple(name for name in FILES if name != "smollm2-q4_0")  # that one is OpenVINO's
FOLDER_FILES = {"smollm2": "smollm2-q4_1", "gemma3-270m": "gemma3-270m-q4_k_m", "llama-1b": "llama-1b-q8_0"}


@dataclass(frozen=True)
class Sizes:
    """What a file's weights amount to."""

    file_bytes: int
    num_parameters: int
    decode_bytes: int  # read for one token: every matrix and vector, of an untied embedding one row
    prefill_parameters: int  # multiplied for every prompt token: matrices outside embedding and head
    vocab_size: int


def default_folder() -> Path:
    from penstock.hub import home

    return home() / "bench"


def make_file(name: str, folder: Path, progress: Progress) -> Path:
    """The path of a file, made first when it is not there."""
    from penstock.hub import resolve_model

    file = FILES[name]
    if not file.quantization:
        return resolve_model(file.model)
    target = folder / f"{name}.gguf"
    if not target.exists():
        source = gguf_file.read(resolve_model("smollm2"))
        tensors = gguf_file.random_llama() if file.model == "llama-1b" else source.tensors
        metadata = gguf_file.llama_metadata(source) if file.model == "llama-1b" else source.metadata
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        gguf_file.write(partial, metadata, tensors, file.quantization, lambda *done: progress(name, *done))
        os.replace(partial, target)
    return target


def make_folder(model: str, folder: Path, progress: Progress) -> Path:
    """A model as transformers has it: config.json, model.safetensors, tokenizer.json."""
    from bench.hf_folder import write

    target = folder / f"{model}-safetensors"
    if not target.exists():
        source = make_file(FOLDER_FILES[model], folder, progress)
        partial = folder / f"{model}-safetensors.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial, source, lambda *done: progress(target.name, *done))
        os.replace(partial, target)
    return target


def sizes(path: Path) -> Sizes:
    """Counted from the headers of a GGUF file, or of a folder with config.json."""
    if path.is_dir():
        return _folder_sizes(path)
    from penstock.models.files.gguf import GgufFile

    file = GgufFile(path)
    try:
        infos = dict(file.tensors)
        embedding = infos["token_embd.weight"]
        rows = embedding.num_bytes // embedding.shape[0]
        tied = "output.weight" not in infos
        total = sum(info.num_bytes for info in infos.values())
        outside = sum(
            math.prod(info.shape)
            for name, info in infos.items()
            if len(info.shape) == 2 and name not in ("token_embd.weight", "output.weight")
        )
        return Sizes(
            path.stat().st_size,
            sum(math.prod(info.shape) for info in infos.values()),
            total if tied else total - embedding.num_bytes + rows,
            outside,
            embedding.shape[0],
        )
    finally:
        file.close()


def _folder_sizes(path: Path) -> Sizes:
    """A folder may have no weights at all (load_format="dummy"): its spec counts them, as float32."""
    from penstock.models.files import read_config
    from penstock.models.spec import spec_from_config

    config: dict[str, Any] = read_config(path)
    count = spec_from_config(config).num_parameters
    table = config["vocab_size"] * config["hidden_size"]
    outside = count - table * (1 if config.get("tie_word_embeddings", True) else 2)
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    return Sizes(num_bytes, count, 4 * (outside + table), outside, config["vocab_size"])


def facts(path: Path, sizes: Sizes) -> dict[str, Any]:
    """What the results say of a file."""
    from dataclasses import asdict

    from penstock.models.files import open_checkpoint

    if path.is_dir() and not any(path.glob("*.safetensors")):
        return {"quantization": "F32", **asdict(sizes)}
    checkpoint = open_checkpoint(path)
    try:
        return {"quantization": checkpoint.quantization, **asdict(sizes)}
    finally:
        checkpoint.close()
