"""Pool hidden states into one embedding, as sentence-transformers folders describe it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import InvalidModel
from penstock.host.files import read_regular

MAX_BYTES = 1 << 22
Mode = Literal["mean", "cls"]
GGUF_MODES: dict[Any, Mode] = {0: "mean", 1: "mean", 2: "cls"}


@dataclass(frozen=True)
class Pooling:
    """The pooling mode of an embedding model."""

    mode: Mode = "mean"
    normalize: bool = True  # to length 1


def _read(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, MAX_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} cannot be read as JSON ({error}): restore the file") from None


def _mode(path: Path) -> Mode:
    config = _read(path)
    if not isinstance(config, dict):
        raise InvalidModel(f"{path} must hold a JSON object")
    named = config.get("pooling_mode")
    on = (
        [named]
        if named is not None
        else [
            key.removeprefix("pooling_mode_").removesuffix("s").removesuffix("_token")
            for key, value in config.items()
            if key.startswith("pooling_mode_") and value is True
        ]
    )
    if on not in (["mean"], ["cls"]):
        raise InvalidModel(f"{path} asks for pooling by {str(on)[:80]}: only one of mean and cls is supported")
    return "mean" if on == ["mean"] else "cls"


def read_pooling(folder: Path) -> Pooling:
    """Read modules.json; mean and normalized if there is none."""
    modules_path = folder / "modules.json"
    if not modules_path.is_file():
        return Pooling()
    modules = _read(modules_path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InvalidModel(f"{modules_path} must hold a list of modules")
    mode: Mode | None = None
    normalize = False
    for module in modules:
        kind, where = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if kind == "Pooling" and Path(where).name == where and where:
            mode = _mode(folder / where / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise InvalidModel(f"{modules_path} has a module {kind!r}: not Transformer, Pooling or Normalize")
    if mode is None:
        raise InvalidModel(f"{modules_path} has no Pooling module, which embeddings need")
    return Pooling(mode, normalize)


def pooling_from_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """Return the pooling that a GGUF file's metadata names, else mean. Always normalized, as in llama.cpp."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key, 0)
    if not isinstance(kind, int) or kind not in GGUF_MODES:
        raise InvalidModel(
            f"{key}={str(kind)[:40]} asks for a pooling that is neither mean (1) nor cls (2): use "
            "a file with one of these"
        )
    return Pooling(GGUF_MODES[kind])
