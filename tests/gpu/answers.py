"""Asking an engine, and judging what it says by an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock import LLM, SamplingParams
from penstock.types import RequestOutput
from tests.gpu.check import require
from tests.gpu.models import Made, log_probabilities

TIED = 1e-3  # float32: two tokens this close in log probability may change places


def prompts(*lengths: int, vocab: int = 1024) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def ask(
    llm: LLM, given: Sequence[list[int]], params: Sequence[SamplingParams] | None = None, **sampling: Any
) -> list[RequestOutput]:
    usual = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "detokenize": False}
    each = list(params) if params else [SamplingParams(**(usual | sampling)) for _ in given]
    outputs = llm.generate(list(given), each, use_tqdm=False)
    for output, one in zip(outputs, each):
        require(output.error is None, f"a request failed: {output.error}")
        require(
            all(len(answer.token_ids) == one.max_tokens for answer in output.outputs) or not one.ignore_eos,
            "an answer is shorter than asked for",
        )
    return outputs


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def require_same(
    made: Made, given: Sequence[list[int]], found: Sequence[list[int]], expected: Sequence[list[int]]
) -> int:
    """Equal tokens, or a first difference between two that are as likely; how many of these there were."""
    ties = 0
    for prompt, a, b in zip(given, found, expected, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        require(at is not None or len(a) == len(b), "one answer is longer than the other")
        if at is not None:
            last = log_probabilities(made.model, prompt + a[:at])[-1]
            gap = abs(float(last[a[at]] - last[b[at]]))
            require(gap < TIED, f"token {at} after {len(prompt)} of a prompt: {a[at]} and {b[at]}, {gap:.4f} apart")
            ties += 1
    return ties


@dataclass
class Judged:
    """How far answers are from the oracle in float32, and how far transformers itself is in the same dtype."""

    regret: float = 0.0  # by how much a chosen token was less likely than the likeliest
    chosen: int = 0  # tokens that were the oracle's own choice
    total: int = 0
    differences: list[float] = field(default_factory=list)  # of told log probabilities
    theirs: list[float] = field(default_factory=list)  # at the same places
    theirs_most: float = 0.0
    theirs_chosen: int = 0

    @property
    def mean(self) -> float:
        return sum(self.differences) / max(1, len(self.differences))

    @property
    def theirs_mean(self) -> float:
        return sum(self.theirs) / max(1, len(self.theirs))


def judge(made: Made, outputs: Sequence[RequestOutput], narrow: bool, into: Judged) -> None:
    """Every token and every told log probability against the oracle after the same beginning."""
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids or ()), output.outputs[0]
        tokens = prompt + list(answer.token_ids)
        expected = log_probabilities(made.model, tokens[:-1])
        alike = log_probabilities(made.narrow(), tokens[:-1]) if narrow else None
        after = expected[len(prompt) - 1 :]
        if alike is not None:
            same = alike[len(prompt) - 1 :]
            into.theirs_most = max(into.theirs_most, float((same - after).abs().max()))
            into.theirs_chosen += int((same.argmax(-1) == after.argmax(-1)).sum())
        taken = torch.tensor(list(answer.token_ids), device=after.device)
        best, own = after.max(-1), after.gather(1, taken[:, None])[:, 0]
        into.regret = max(into.regret, float((best.values - own).max()))
        into.chosen += int((best.indices == taken).sum())
        into.total += len(answer.token_ids)
        told = [
            (len(prompt) - 1 + at, token, ranked)
            for at, (token, ranked) in enumerate(zip(answer.token_ids, answer.logprobs or ()))
        ]
        told += [(at - 1, prompt[at], ranked) for at, ranked in enumerate(output.prompt_logprobs or ()) if ranked]
        for at, token, ranked in told:
            into.differences.append(abs(ranked[token].logprob - float(expected[at, token])))
            if alike is not None:
                into.theirs.append(abs(float(alike[at, token] - expected[at, token])))
