"""Write safetensors files: whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors under their names; the file appears when it is complete and on the disk."""
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_stream(path, shapes, (tensors[name] for name, _, _ in shapes), metadata)


def write_stream(
    path: Path,
    described: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as they come, in the order described."""
    begin = 0
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, dtype, shape in described:
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                stored = tensor.detach().contiguous().reshape(-1)
                file.write(stored.view(torch.uint8).numpy().data if stored.numel() else b"")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
