"""Checkpoints on disk: a folder with safetensors or a GGUF file comes in, config, names and tensors go out.

Everything is checked against the file's size before it is used; whatever is wrong is an `InvalidModel` of one line.
Nothing here knows what the tensors are for.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.gguf_checkpoint import GgufCheckpoint
from penstock.models.files.json_file import read_config, read_generation_config
from penstock.models.files.safetensors import PICKLES, SafetensorsCheckpoint, pickle_refused

__all__ = ["Checkpoint", "open_checkpoint", "read_config", "read_generation_config"]


def open_checkpoint(path: Path) -> Checkpoint:
    """A model folder or a `.gguf` file, ready to hand out tensors."""
    path = Path(path)
    try:
        if path.is_dir():
            return SafetensorsCheckpoint(path)
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
        raise pickle_refused(path)
    if path.suffix == ".safetensors":
        raise InvalidModel(f"{path} holds weights only; name its folder, which has the config.json too")
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise InvalidModel(f"{path} is no model: name a folder with config.json and safetensors, or a .gguf file")
