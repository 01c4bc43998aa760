"""Read checkpoints: a safetensors folder or a GGUF file in; config, names and tensors out.

Everything is checked against the file's size before use; any damage is a one-line `InvalidModel`. Nothing here knows
what the tensors are for.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.gguf_checkpoint import GgufCheckpoint
from penstock.models.files.json_file import read_config, read_generation_config
from penstock.models.files.quantized.checkpoint import wrap_folder
from penstock.models.files.safetensors import PICKLES, SafetensorsCheckpoint, pickle_error

__all__ = ["Checkpoint", "open_checkpoint", "read_config", "read_generation_config"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model folder or a `.gguf` file, also one of several parts."""
    path = Path(path)
    try:
        if path.is_dir():
            return wrap_folder(SafetensorsCheckpoint(path))
        if path.is_file():
            return _open_file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidModel):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidModel(f"{path} cannot be read: {reason}") from None
    raise InvalidModel(f"{path}: no such file or folder; name a model folder with config.json, or a .gguf file")


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLES:
        raise pickle_error(path)
    if path.suffix == ".safetensors":
        raise InvalidModel(f"{path} holds weights only; name its folder, which has the config.json too")
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise InvalidModel(f"{path} is not a model: name a folder with config.json and safetensors, or a .gguf file")
