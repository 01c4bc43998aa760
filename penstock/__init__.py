"""Penstock: one small, exact, fast LLM inference engine. Only the public names live here, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.config import EngineConfig
    from penstock.errors import PenstockError
    from penstock.llm import LLM
    from penstock.types import (
        BeamSearchParams,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        StreamDelta,
        StructuredOutputsParams,
    )

__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "EngineConfig", "PenstockError", "RequestOutput",
           "SamplingParams", "StreamDelta", "StructuredOutputsParams"]

_HOME = {
    "LLM": "penstock.llm", "AsyncLLM": "penstock.async_llm", "EngineConfig": "penstock.config",
    "PenstockError": "penstock.errors", "BeamSearchParams": "penstock.types", "CompletionOutput": "penstock.types",
    "RequestOutput": "penstock.types", "SamplingParams": "penstock.types", "StreamDelta": "penstock.types",
    "StructuredOutputsParams": "penstock.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    from penstock.machine import held_collector

    with held_collector():
        return getattr(import_module(_HOME[name]), name)
