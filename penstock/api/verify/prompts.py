"""Compare answers to a few prompts with a float32 model, and alone with in company."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.api.verify.finding import Finding
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.types import CompletionOutput

Reference = Callable[[Sequence[Sequence[int]]], Tensor]
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Il était une fois, dans un petit village,",
)
ANSWER_TOKENS = 12
NUM_IDS = (5, 9, 17, 33)  # tokens of the prompts of a model without a tokenizer
MAX_NATS = {
    "float32": 1e-2,
    "16": 0.1,
    "packed": 0.5,
    "int4 cache": 1.0,
}  # between log probabilities of the chosen tokens, on average


def compare_prompts(llm: LLM, reference: Reference, storage: str, is_exact: bool) -> Iterator[Finding]:
    """Answer some prompts; `reference` gives log probabilities [T, V] after the tokens of sequences."""
    prompts = _prompts(llm)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, logprobs=0, ignore_eos=True)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    together = [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]
    alone = [llm.generate([one], params, use_tqdm=False)[0].outputs[0] for one in given]
    rows = [[*ids, *answer.token_ids] for ids, answer in zip(prompts, together)]
    scored, begin = reference(rows), 0
    for number, (ids, row, answer, single) in enumerate(zip(prompts, rows, together, alone), 1):
        if is_exact:
            same = _figures(answer) == _figures(single)
            yield Finding(f"prompt {number}", "alone as in company, bits", float(not same), 0.0)
        first = begin + len(ids) - 1
        yield _score(number, answer, scored[first : first + len(answer.token_ids)], MAX_NATS[storage])
        begin += len(row)


def _prompts(llm: LLM) -> list[list[int]]:
    if llm.tokenizer is not None:
        return [llm.tokenizer.encode(text) for text in TEXTS]
    size = llm.service.assembly.spec.vocab_size
    return [[(7919 * at + count) % size for at in range(count)] for count in NUM_IDS]


def _figures(answer: CompletionOutput) -> tuple[object, ...]:
    return tuple(answer.token_ids), tuple(_logprobs(answer))


def _logprobs(answer: CompletionOutput) -> list[float]:
    assert answer.logprobs is not None
    return [found[token].logprob for found, token in zip(answer.logprobs, answer.token_ids)]


def _score(number: int, answer: CompletionOutput, scored: Tensor, limit: float) -> Finding:
    """Compare the log probabilities of the answer's tokens with the reference's [T, V]."""
    ids = torch.tensor(answer.token_ids)
    apart = scored.gather(1, ids[:, None])[:, 0].double() - torch.tensor(_logprobs(answer), dtype=torch.float64)
    agreed = int((scored.argmax(-1) == ids).sum())
    detail = f"{agreed} of {len(ids)} tokens are the reference's first choice"
    error = float(apart.abs().mean())
    return Finding(
        f"prompt {number}", "against float32, nats", error if error == error else math.inf, limit, len(ids), detail
    )
