"""vLLM's module of this name: how answers are sampled."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidRequest, shown
from penstock.types import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def GuidedDecodingParams(*, backend: str | None = None, disable_fallback: bool = False,
                         disable_additional_properties: bool = False, whitespace_pattern: str | None = None,
                         **values: Any) -> StructuredOutputsParams:
    """vLLM's older name of StructuredOutputsParams. There is one backend, so the first two change nothing."""
    if disable_additional_properties:
        raise InvalidRequest("disable_additional_properties=True is not supported: write additionalProperties=false "
                             "into the schema")
    if whitespace_pattern is not None:
        raise InvalidRequest(f"whitespace_pattern={shown(whitespace_pattern)} is not supported: "
                             "disable_any_whitespace=True leaves whitespace out")
    return StructuredOutputsParams(**values)
