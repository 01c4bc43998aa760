"""Small random models as checkpoints, with transformers as their oracle on the same device."""

from __future__ import annotations

import copy
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from penstock import LLM
from penstock.models.files import open_checkpoint
from penstock.models.spec import spec_from_config
from tests.gpu.check import require
from tests.gpu.shapes import SHAPES, SMOLLM2
from tests.models import oracle

DEVICE = os.environ.get("PENSTOCK_TESTS_ON", "cuda")  # "cpu": to try the script itself out
SPREAD = 0.075  # of matrices 256 wide: each makes a little more of its input
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-gpu-")


@dataclass
class Made:
    """A checkpoint's folder, and its model in float32; all weights are numbers that bfloat16 holds."""

    folder: Path
    model: Any

    @lru_cache(maxsize=1)  # noqa: B019  models are few, and freed together
    def narrow(self) -> Any:
        """The same in bfloat16, positions' angles aside."""
        made = copy.deepcopy(self.model)
        for parameter in made.parameters():
            parameter.data = parameter.data.bfloat16()
        return made

    def __hash__(self) -> int:
        return id(self)


def _made(name: str, architecture: str, shape: dict[str, Any], spread: float) -> Made:
    model = oracle.make(architecture, {key: value for key, value in shape.items() if key != "only"}, spread=spread)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    folder = oracle.save(model, Path(_FOLDERS.name) / name)
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    checkpoint.close()
    if not spec.is_encoder:
        oracle.resolve_rope(model, spec.max_model_len)
    return Made(folder, model.to(DEVICE))


@lru_cache(maxsize=4)
def made(architecture: str, number: int = 0) -> Made:
    return _made(f"{architecture}-{number}", architecture, SHAPES[architecture][number], SPREAD)


@lru_cache(maxsize=1)
def smollm2() -> Made:
    return _made("smollm2", "LlamaForCausalLM", SMOLLM2, 0.05)


def engine(folder: Path, **options: Any) -> LLM:
    """On the device, whatever `auto` would say."""
    given: dict[str, Any] = {
        "device": DEVICE,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 64,
        "kv_cache_tokens": 16384,
        "threads": 2,
    } | options
    if given["device"] == "cpu":
        given |= {"kv_cache_dtype": "float32", "enforce_eager": False}
    llm = LLM(str(folder), progress=False, **given)
    where = {setting.name: setting.value for setting in llm.settings}["device"]
    require(where == given["device"], f"the engine runs on {where}")
    return llm


@torch.no_grad()
def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """[L, V]: after each token, in one pass without a cache."""
    logits = model(torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)
