"""A GGUF file's weights as a folder that transformers, and whatever builds on it, reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BF16_OVER = 600_000_000  # parameters; larger models are written in half the bytes


def write(folder: Path, source: Path, progress: Callable[[int, int], None]) -> None:
    import torch
    from safetensors.torch import save_file

    from penstock.models.files import open_checkpoint
    from penstock.text.tokenizers.gguf import read_vocabulary

    checkpoint = open_checkpoint(source)
    names = checkpoint.names()
    count = sum(torch.Size(checkpoint.shape(name)).numel() for name in names)
    dtype = torch.bfloat16 if count > BF16_OVER else torch.float32
    tensors = {}
    for name in names:
        tensors[name] = checkpoint.tensor(name).to(dtype).contiguous()
        progress(sum(tensor.numel() for tensor in tensors.values()), count)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {key: value for key, value in config.items() if key.endswith("_token_id")})
    vocabulary = read_vocabulary(checkpoint.tokenizer_source())  # type: ignore[arg-type]
    (folder / "tokenizer.json").write_text(vocabulary.backend.to_str(), encoding="utf-8")
    _dump(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.named})
    checkpoint.close()


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
