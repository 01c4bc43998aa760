"""Sampling parameters, under vLLM's module name."""

from __future__ import annotations

from typing import Any

from penstock.types import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def GuidedDecodingParams(**values: Any) -> StructuredOutputsParams:
    """Accept vLLM's older name of StructuredOutputsParams."""
    return StructuredOutputsParams(**values)
