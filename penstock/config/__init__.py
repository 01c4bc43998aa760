"""Options and facts of model and machine in, a table of values and their reasons out. Knows no device."""

from penstock.config.cache_dtypes import choose_plain_dtype
from penstock.config.options import CAPACITIES, POLICIES, TPOT_STEPS, TTFT_STEPS, EngineConfig, check_options, option
from penstock.config.resolve import (
    DEFAULT,
    GIB,
    GPU_RESERVE,
    GPU_SEQS,
    INT_SCRATCH,
    MIN_CACHE_TOKENS,
    STEP_TOKENS,
    Facts,
    GpuFacts,
    Resolved,
    Setting,
    resolve,
)

__all__ = [
    "CAPACITIES",
    "DEFAULT",
    "GIB",
    "GPU_RESERVE",
    "GPU_SEQS",
    "INT_SCRATCH",
    "MIN_CACHE_TOKENS",
    "POLICIES",
    "STEP_TOKENS",
    "TPOT_STEPS",
    "TTFT_STEPS",
    "EngineConfig",
    "Facts",
    "GpuFacts",
    "Resolved",
    "Setting",
    "check_options",
    "choose_plain_dtype",
    "option",
    "resolve",
]
