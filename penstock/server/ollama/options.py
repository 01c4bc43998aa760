"""Ollama's `options`: each honoured, or named here as without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from penstock.errors import shown
from penstock.server.fields import WHOLE, Body, StopString
from penstock.server.model import ServedModel
from penstock.types import SamplingParams

# Ollama's own, for models that recommend nothing
OWN: Mapping[str, float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
    "repeat_last_n": 64,
}
RENAMED = {"repeat_penalty": "repetition_penalty"}
SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
# how a model is held is decided when the server starts, and samplers that Ollama itself has given up
IDLE = (
    "num_keep",
    "num_batch",
    "num_gpu",
    "num_gqa",
    "num_thread",
    "main_gpu",
    "numa",
    "low_vram",
    "f16_kv",
    "use_mmap",
    "use_mlock",
    "vocab_only",
    "logits_all",
    "embedding_only",
    "rope_frequency_base",
    "rope_frequency_scale",
    "tfs_z",
    "penalize_newline",
)


class OllamaOptions(Body):
    num_predict: int | None = Field(None, ge=-2, le=WHOLE)  # 0 and less: as many as fit
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=WHOLE)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)  # -1: another one each time
    stop: StopString | list[StopString] | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: int | None = Field(None, ge=-1, le=WHOLE)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=1e6)
    mirostat_eta: float | None = Field(None, ge=0, le=1)
    # without effect, which a warning says
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
    tfs_z: float | None = None
    penalize_newline: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Under OpenAI's and vLLM's names; how many tokens is decided once the prompt's length is known."""
        values = {name: getattr(self, name) for name in SAME}
        values |= {name: getattr(self, own) for own, name in RENAMED.items()}
        values["seed"] = None if self.seed == -1 else self.seed
        return {name: value for name, value in values.items() if value is not None}

    def notices(self, max_model_len: int) -> list[str]:
        """Warnings of what was asked for and has no effect."""
        idle = [name for name in IDLE if getattr(self, name) not in (None, False)]
        told = [f"options are without effect here: {', '.join(idle)}"] if idle else []
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            told.append(
                f"num_ctx={shown(self.num_ctx)} is without effect: this model has {max_model_len} tokens of "
                "context here; a larger --max-model-len may give it more"
            )
        return told

    def max_tokens(self, room: int) -> int | None:
        """As Ollama does, an answer ends where there is no more room; None is all of it."""
        wanted = self.num_predict or -1
        return wanted if 0 < wanted <= room else None


def own_defaults(model: ServedModel) -> SamplingParams:
    """The sampling values that a body leaves open."""
    return model.defaults.clone(**model.found_defaults.yield_to(OWN))
