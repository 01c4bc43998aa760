"""Reading a GGUF file's values, and writing them again in another type with the `gguf` package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Values = Callable[[], np.ndarray]  # float32, made when it is wanted
Progress = Callable[[int, int], None]
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}  # general.file_type
REPLACED = ("general.file_type", "general.architecture", "general.quantization_version")

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, FEED_FORWARD, VOCABULARY = 2048, 22, 32, 4, 64, 5632, 49152
SEED, DEVIATION = 1170, 0.02
CONTEXT = 8192


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    values: Values


@dataclass(frozen=True)
class Key:
    """A value of the metadata and the two types GGUF has it in (the second is an array's element)."""

    value: Any
    types: tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    metadata: dict[str, Key]
    tensors: list[Tensor]


def read(path: Path) -> Source:
    """Everything in a file; its tensors are dequantized by Penstock's own reader, one at a time."""
    import gguf

    from penstock.models.files.gguf import GgufFile, TensorInfo
    from penstock.quant.gguf import dequantize

    fields = gguf.GGUFReader(path).fields
    metadata = {
        name: Key(field.contents(), tuple(field.types))
        for name, field in fields.items()
        if not name.startswith("GGUF.")
    }
    file = GgufFile(path)

    def values(info: TensorInfo) -> Values:
        return lambda: dequantize(file.raw(info), info.ggml_type, info.shape).reshape(info.shape)

    return Source(metadata, [Tensor(info.name, info.shape, values(info)) for info in file.tensors.values()])


def write(
    path: Path, metadata: Mapping[str, Key], tensors: Iterable[Tensor], quantization: str, progress: Progress
) -> None:
    """Every matrix in the given type, every vector in float32. Tensors are made, written and let go one by one."""
    import gguf

    tensors = list(tensors)
    kind = gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"].value))
    for name, key in metadata.items():
        if name not in REPLACED:
            writer.add_key_value(name, key.value, key.types[0], key.types[-1] if len(key.types) > 1 else None)
    writer.add_file_type(FILE_TYPES[quantization])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    sizes = [math.prod(t.shape) * (4 if len(t.shape) == 1 else block_bytes / block_size) for t in tensors]
    for tensor, size in zip(tensors, sizes):
        stored = kind if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), int(size), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    for tensor, size in zip(tensors, sizes):
        values = tensor.values().astype(np.float32, copy=False)
        writer.write_tensor_data(gguf.quants.quantize(values, kind) if values.ndim > 1 else values)
        done += int(size)
        progress(done, int(sum(sizes)))
    writer.close()


def llama_metadata(tokenizer: Source) -> dict[str, Key]:
    """Of the random Llama, with another file's tokenizer."""
    from gguf import GGUFValueType as T

    def count(value: int) -> Key:
        return Key(value, (T.UINT32,))

    taken = {name: key for name, key in tokenizer.metadata.items() if name.startswith("tokenizer.")}
    return taken | {
        "general.architecture": Key("llama", (T.STRING,)),
        "general.name": Key("random 1.17B", (T.STRING,)),
        "llama.block_count": count(LAYERS),
        "llama.context_length": count(CONTEXT),
        "llama.embedding_length": count(HIDDEN),
        "llama.feed_forward_length": count(FEED_FORWARD),
        "llama.attention.head_count": count(HEADS),
        "llama.attention.head_count_kv": count(KV_HEADS),
        "llama.rope.dimension_count": count(HEAD_SIZE),
        "llama.vocab_size": count(VOCABULARY),
        "llama.rope.freq_base": Key(10000.0, (T.FLOAT32,)),
        "llama.attention.layer_norm_rms_epsilon": Key(1e-5, (T.FLOAT32,)),
    }


def random_llama() -> list[Tensor]:
    """Normal numbers from a fixed seed, each tensor from its own stream; norms are ones."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in (
                ("attn_norm", (HIDDEN,)),
                ("attn_q", (HEADS * HEAD_SIZE, HIDDEN)),
                ("attn_k", (KV_HEADS * HEAD_SIZE, HIDDEN)),
                ("attn_v", (KV_HEADS * HEAD_SIZE, HIDDEN)),
                ("attn_output", (HIDDEN, HEADS * HEAD_SIZE)),
                ("ffn_norm", (HIDDEN,)),
                ("ffn_gate", (FEED_FORWARD, HIDDEN)),
                ("ffn_up", (FEED_FORWARD, HIDDEN)),
                ("ffn_down", (HIDDEN, FEED_FORWARD)),
            )
        }
    shapes |= {"output_norm.weight": (HIDDEN,), "output.weight": (VOCABULARY, HIDDEN)}
    return [Tensor(name, shape, _random(index, shape)) for index, (name, shape) in enumerate(shapes.items())]


def _random(stream: int, shape: tuple[int, ...]) -> Values:
    if len(shape) == 1:
        return lambda: np.ones(shape, np.float32)
    return lambda: np.random.default_rng((SEED, stream)).standard_normal(shape, np.float32) * np.float32(DEVIATION)
