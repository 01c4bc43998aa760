"""Penstock: one small, exact, fast LLM inference engine. Only the public names live here, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_engine import AsyncLLMEngine
    from penstock.async_llm import AsyncLLM
    from penstock.config import EngineConfig
    from penstock.engine_args import AsyncEngineArgs, EngineArgs
    from penstock.errors import PenstockError
    from penstock.inputs import TextPrompt, TokensPrompt
    from penstock.llm import LLM
    from penstock.llm_engine import LLMEngine
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
    "async_engine": ("AsyncLLMEngine",),
    "async_llm": ("AsyncLLM",),
    "config": ("EngineConfig",),
    "engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "errors": ("PenstockError",),
    "inputs": ("TextPrompt", "TokensPrompt"),
    "llm": ("LLM",),
    "llm_engine": ("LLMEngine",),
    "outputs": ("PoolingOutput", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    "sampling_params": ("GuidedDecodingParams",),
    "types": (
        "BeamSearchParams",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StreamDelta",
        "StructuredOutputsParams",
    ),
    "version": ("__version__",),
}
_HOME = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    from penstock.machine import held_collector

    with held_collector():
        return getattr(import_module(_HOME[name]), name)
