"""Ollama's `options`: each honoured, or named here as without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from penstock.server.fields import WHOLE, Body, StopString
from penstock.server.model import ServedModel
from penstock.types import SamplingParams

# Ollama's own, for models that recommend nothing
OWN: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0,
                            "repetition_penalty": 1.1, "repeat_last_n": 64}
RENAMED = {"repeat_penalty": "repetition_penalty"}
SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "stop", "presence_penalty", "frequency_penalty")


class OllamaOptions(Body):
    num_predict: int | None = Field(None, ge=-2, le=WHOLE)      # 0 and less: as many as fit
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=WHOLE)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)       # -1: another one each time
    stop: StopString | list[StopString] | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: int | None = Field(None, ge=-1, le=WHOLE)    # 0 switches penalties off; else they reach back to all
    # without effect: how a model is held is decided when the server starts
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_gqa: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None
    # without effect: samplers that Ollama itself has given up
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Under OpenAI's and vLLM's names; how many tokens is decided once the prompt's length is known."""
        values = {name: getattr(self, name) for name in SAME}
        values |= {name: getattr(self, own) for own, name in RENAMED.items()}
        values["seed"] = None if self.seed == -1 else self.seed
        if self.repeat_last_n == 0:
            values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {name: value for name, value in values.items() if value is not None}

    def max_tokens(self, room: int) -> int | None:
        """As Ollama does, an answer ends where there is no more room; None is all of it."""
        wanted = self.num_predict or -1
        return wanted if 0 < wanted <= room else None


def own_defaults(model: ServedModel) -> SamplingParams:
    """The sampling values that a body leaves open."""
    return model.defaults.clone(**model.found_defaults.yield_to(OWN))
