"""Counters since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    num_requests: int = 0
    num_refused: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    max_batch_size: int = 0  # most sequences in one step
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens not computed thanks to the prefix cache
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_forks: int = 0  # sequences that began with another's blocks
    step_s: float = 0.0  # in steps, from the queue to the text
    forward_s: float = 0.0  # of that, in forward passes
    sampling_s: float = 0.0  # of that, choosing tokens from their logits
