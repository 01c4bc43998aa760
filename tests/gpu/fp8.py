"""Weights and cache in 8-bit floats, against transformers in float32."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.answers import ids
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import engine
from tests.gpu.plain import KINDS, PROMPTS, answers, nearness, plain

CACHE, WEIGHTS = {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}
OPTIONS: dict[str, dict[str, Any]] = {"cache": CACHE, "weights": WEIGHTS, "both": CACHE | WEIGHTS}
# The least share of the oracle's own choices, and the most mean difference. Rounded on the CPU, the same weights and
# activations choose 0.86 of the oracle's tokens, at a mean difference of 0.014.
BOUNDS = {"cache": (0.85, 0.03), "weights": (0.75, 0.04), "both": (0.7, 0.05)}
ROADS = [(kind, what) for kind in KINDS for what in OPTIONS]


def _need() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise Skip("no GPU with 8-bit floats")


@check([(*road, dtype) for road in ROADS for dtype in ("bfloat16", "float16", "float32")])
def fp8_near_transformers(kind: str, what: str, dtype: str) -> Figures:
    """Launched kernel by kernel, and recorded."""
    _need()
    one, (least, most) = plain(kind), BOUNDS[what]
    figures: Figures = {}
    for eager in (True, False):
        with engine(one.folder, dtype=dtype, enforce_eager=eager, **OPTIONS[what]) as llm:
            same, apart = nearness(one.model, PROMPTS, answers(llm, PROMPTS, logprobs=1))
        way = "eager" if eager else "recorded"
        figures |= {f"{way}: own choice": same, f"{way}: mean |Δ|": apart}
        require(same >= least and apart <= most, f"far from transformers: {figures}")
    return figures


@check(ROADS)
def fp8_recorded_steps_go_on_like_eager_ones(kind: str, what: str) -> Figures:
    """In float32; one that lies between two codes may be rounded otherwise and take another way."""
    _need()
    found = []
    for eager in (True, False):
        with engine(plain(kind).folder, dtype="float32", enforce_eager=eager, **OPTIONS[what]) as llm:
            found.append(ids(answers(llm, PROMPTS)))
    same = sum(a == b for a, b in zip(*found))
    require(same >= len(PROMPTS) - 2, f"{same} of {len(PROMPTS)} answers are the same")
    return {"same": f"{same}/{len(PROMPTS)}"}


@check([(kind,) for kind in KINDS])
def fp8_shared_prefix(kind: str) -> Figures:
    """40 sequences with 600 tokens in common, and each alone; a key of its own may be rounded otherwise."""
    _need()
    common = [(j * j) % 1000 for j in range(600)]
    prompts = [common + [(i * 31 + j) % 1000 for j in range(5 + i)] for i in range(40)]
    with engine(plain(kind).folder, dtype="float32", **CACHE) as llm:
        answers(llm, prompts[:1])
        together = ids(answers(llm, prompts))
        alone = [ids(answers(llm, [prompt]))[0] for prompt in prompts[:8]]
    same = sum(a == b for a, b in zip(together, alone))
    require(same >= len(alone) - 1, f"{same} of {len(alone)} answers are the same alone")
    return {"same": f"{same}/{len(alone)}"}
