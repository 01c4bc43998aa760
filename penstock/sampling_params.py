"""vLLM's module of this name: how answers are sampled."""

from __future__ import annotations

from typing import Any

from penstock.types import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def GuidedDecodingParams(**values: Any) -> StructuredOutputsParams:
    """vLLM's older name of StructuredOutputsParams."""
    return StructuredOutputsParams(**values)
