"""Every family against transformers on the same device."""

from __future__ import annotations

import torch

from tests.gpu.answers import Judged, ask, judge, prompts
from tests.gpu.check import Figures, check, require
from tests.gpu.models import engine, made, smollm2
from tests.gpu.shapes import SHAPES, dtypes

CASES = [
    (name, number, dtype)
    for name, shapes in SHAPES.items()
    for number, shape in enumerate(shapes)
    for dtype in dtypes(shape)
    if name != "BertModel"
]


def agreement(dtype: str, judged: Judged) -> Figures:
    """In float32 to the last digits but a few; in bfloat16 about as near as transformers is in bfloat16."""
    figures: Figures = {
        "own choice": f"{judged.chosen}/{judged.total}",
        "mean |Δ|": judged.mean,
        "regret": judged.regret,
    }
    require(len(judged.differences) > 100, "hardly anything was compared")
    if dtype == "float32":
        require(judged.mean <= 1e-4 and judged.regret <= 1e-3, f"far from transformers: {figures}")
        return figures
    figures |= {
        "transformers": f"{judged.theirs_chosen}/{judged.total}",
        "mean": judged.theirs_mean,
        "at most": judged.theirs_most,
    }
    most = min(2 * judged.theirs_mean + 0.005, max(0.1, 1.1 * judged.theirs_mean))
    require(judged.mean <= most, f"far from transformers: {figures}")
    require(judged.regret <= 2 * judged.theirs_most + 0.02, f"another choice than transformers': {figures}")
    require(judged.chosen >= judged.theirs_chosen - 0.1 * judged.total, f"too many other choices: {figures}")
    return figures


@check(CASES)
def agrees_with_transformers(architecture: str, number: int, dtype: str) -> Figures:
    """Prompts whole and in chunks, windows passed, steps recorded and replayed; then chosen by the host, with log
    probabilities of prompts and answers."""
    one, given = made(architecture, number), prompts(1, 7, 38, 90, 170)
    judged = Judged()
    with engine(one.folder, dtype=dtype, max_num_batched_tokens=128) as llm:
        greedy = ask(llm, given)
        told = ask(llm, given, logprobs=1, prompt_logprobs=0)
    for outputs in (greedy, told):
        judge(one, outputs, dtype != "float32", judged)
    with torch.no_grad():
        spread = float(one.model(torch.tensor([given[2]], device=next(one.model.parameters()).device)).logits.std())
    require(spread > 0.3, f"the oracle's logits say nothing: their deviation is {spread}")
    return agreement(dtype, judged)


@check([("float32",), ("bfloat16",)])
def smollm2_shaped_model(dtype: str) -> Figures:
    """30 layers, 9 heads on 3, a tied head of 49152 tokens."""
    one, given, judged = smollm2(), prompts(3, 64, 300, 700, vocab=49152), Judged()
    with engine(one.folder, dtype=dtype) as llm:
        judge(one, ask(llm, given, max_tokens=40), dtype != "float32", judged)
        judge(one, ask(llm, given[:2], max_tokens=40, logprobs=1, prompt_logprobs=0), dtype != "float32", judged)
    return agreement(dtype, judged)
