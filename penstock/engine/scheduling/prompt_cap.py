"""Prompt tokens that a step may compute beside decode rows, by measured step costs and two aims.

A step with prompts takes K + s·P seconds for P prompt tokens. Chunks that are too small lose pace: prompts advance by
P / (K + s·P) tokens a second, 1 / s at best. Chunks that are too large stall the answers of all decode rows.
"""

from __future__ import annotations

import math

from penstock.config import TPOT_STEPS, TTFT_STEPS
from penstock.engine.scheduling.step_fit import StepFit

MIN_CHUNK = 32  # tokens; every step with a waiting prompt computes as many
MIN_OVERHEAD = 0.1  # K / (s·P) of the largest chunk: prompts are 9 % below full pace, larger ones would gain little
MAX_OVERHEAD = 0.3  # of the smallest chunk, unless the user has a TPOT aim: prompts are 23 % below full pace
MAX_WASTE = 0.05  # of a chunk's cost, where a step with prompts costs more than a decode step before its first token
ROWS, TOKENS = 128, 1024  # units of the fits


class PromptCap:
    """Chooses the cap of a step and learns from its cost. Pure: times come from results."""

    def __init__(self, tpot_s: float | None = None, ttft_s: float | None = None) -> None:
        """Aims that are None follow from the measured cost of a decode step without rows: what every step costs."""
        self.tpot_s, self.ttft_s = tpot_s, ttft_s
        self._decode = StepFit(1)
        self._mixed = StepFit(2)
        self._hidden = 0.0  # prompt tokens that add nothing to a decode step

    def note(self, num_decode: int, num_prompt: int, seconds: float) -> None:
        """Take note of a step of so many decode rows and prompt tokens."""
        if seconds <= 0 or not math.isfinite(seconds):
            return
        if not num_prompt:
            self._decode.note((num_decode / ROWS,), seconds)
        elif num_prompt >= max(MIN_CHUNK, self._hidden):  # the cost is not linear below
            self._mixed.note((num_decode / ROWS, num_prompt / TOKENS), seconds)

    def choose(self, num_decode: int, backlog: int) -> int | None:
        """Return the most prompt tokens for a step of so many decode rows while `backlog` prompt tokens wait; None for
        no cap: no sequence decodes, or too little was measured."""
        if not num_decode or not self._decode.is_ready or not self._mixed.is_ready:
            return None
        decode_s = self._decode.estimate(num_decode / ROWS)
        step_s = max(self._decode.estimate(0.0), decode_s / 4)
        constant, per_row, per_token = self._mixed.coefficients
        token_s, fixed_s = per_token / TOKENS, constant + per_row * num_decode / ROWS
        if token_s <= 0 or decode_s <= 0:
            return None
        hidden = self._hidden = min(max(0.0, decode_s - fixed_s), 2 * decode_s) / token_s
        paid_s = max(0.0, fixed_s)
        largest = max(hidden, paid_s / (MIN_OVERHEAD * token_s))
        smallest = float(MIN_CHUNK)
        if self.tpot_s is None:
            waste_s = max(0.0, fixed_s - decode_s)
            smallest = max(hidden, paid_s / (MAX_OVERHEAD * token_s), waste_s / (MAX_WASTE * token_s))
        within = (_or(self.tpot_s, TPOT_STEPS * step_s) - fixed_s) / token_s
        left_s = _or(self.ttft_s, TTFT_STEPS * step_s) / 2 - token_s * backlog  # half: more prompts will come
        needed = backlog * paid_s / left_s if left_s > 0 else largest
        return math.ceil(max(MIN_CHUNK, smallest, min(largest, max(within, needed))))


def _or(aim_s: float | None, default_s: float) -> float:
    return default_s if aim_s is None else aim_s
