"""Requests, their parameters and their outputs. Plain data: no torch, no numpy.

In: values from anywhere, each checked when it is set. Out: valid params and requests, and answers.
"""

from __future__ import annotations

from penstock.types.applied import Applied, DraftCount
from penstock.types.lora import LoRARequest
from penstock.types.output import (
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamDelta,
    TokenLogprobs,
)
from penstock.types.request import (
    MAX_BEAMS,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    LoraUse,
    ReasoningBlock,
    Request,
)
from penstock.types.sampling import (
    MAX_BREAKER_CHARS,
    MAX_BREAKERS,
    MAX_DRY_LENGTH,
    MAX_LOGPROBS,
    MAX_LOOKBACK,
    MAX_SIBLINGS,
    MAX_STOP_STRINGS,
    RequestOutputKind,
    SamplingParams,
)
from penstock.types.speculation import SpeculationParams
from penstock.types.structure import MAX_STRUCTURE_BYTES, STRUCTURES, GrammarFacts, StructuredOutputsParams

__all__ = [
    "MAX_BEAMS",
    "MAX_BREAKERS",
    "MAX_BREAKER_CHARS",
    "MAX_DRY_LENGTH",
    "MAX_LOGPROBS",
    "MAX_LOOKBACK",
    "MAX_SIBLINGS",
    "MAX_STOP_STRINGS",
    "MAX_STRUCTURE_BYTES",
    "STRUCTURES",
    "Applied",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Delta",
    "DraftCount",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GrammarFacts",
    "Logprob",
    "LoRARequest",
    "LoraUse",
    "ReasoningBlock",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculationParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "TokenLogprobs",
]
