"""Penstock: a small, exact, fast LLM inference engine. Only the public names live here, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api.async_llm import AsyncLLM
    from penstock.api.llm import LLM
    from penstock.api.vllm.async_engine import AsyncLLMEngine
    from penstock.api.vllm.llm_engine import LLMEngine
    from penstock.api.vllm.porting import AsyncEngineArgs, EngineArgs
    from penstock.config import EngineConfig
    from penstock.errors import PenstockError
    from penstock.inputs import TextPrompt, TokensPrompt
    from penstock.outputs import (
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from penstock.sampling_params import GuidedDecodingParams
    from penstock.types import (
        BeamSearchParams,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        LoRARequest,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StreamDelta,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "PenstockError",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamDelta",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_NAMES = {
    "api.vllm.async_engine": ("AsyncLLMEngine",),
    "api.async_llm": ("AsyncLLM",),
    "config": ("EngineConfig",),
    "api.vllm.porting": ("AsyncEngineArgs", "EngineArgs"),
    "errors": ("PenstockError",),
    "inputs": ("TextPrompt", "TokensPrompt"),
    "api.llm": ("LLM",),
    "api.vllm.llm_engine": ("LLMEngine",),
    "outputs": ("PoolingOutput", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    "sampling_params": ("GuidedDecodingParams",),
    "types": (
        "BeamSearchParams",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "LoRARequest",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StreamDelta",
        "StructuredOutputsParams",
    ),
    "host.version": ("__version__",),
}
_HOME = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    from penstock.host.machine import held_collector

    with held_collector():
        return getattr(import_module(_HOME[name]), name)
