"""Experts: a captured product follows any routing; weights in 8 and 4 bits stay near those in 16."""

from __future__ import annotations

import torch

from penstock.ops import OPS
from penstock.types import RequestOutput
from tests.gpu.answers import ask, prompts
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE, engine, made

# The most mean difference of a prompt's log probabilities from those with 16-bit weights.
BOUNDS = {"fp8": 0.2, "int8": 0.1, "int4": 0.6}
AMPLIFIED = {"GptOssForCausalLM": 2.0}  # its random weights amplify any rounding: a CPU's int8 is 0.11 apart


@check([(1,), (4,), (40,), (300,)])
def a_captured_product_follows_any_routing(num_rows: int) -> Figures:
    if DEVICE == "cpu":
        raise Skip("captures need a GPU")
    chance = torch.Generator(DEVICE).manual_seed(num_rows)
    x = torch.randn(num_rows, 256, generator=chance, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(32 * 128, 256, generator=chance, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.zeros(num_rows, 4, dtype=torch.int32, device=DEVICE)
    multiply = OPS["grouped_product"].bodies["cuda"].function
    multiply(x, weight, ids, 32)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = multiply(x, weight, ids, 32)
    for high in (32, 1, 5):
        ids.copy_(torch.randint(-1, high, ids.shape, generator=chance, device=DEVICE, dtype=torch.int32))
        graph.replay()
        require(torch.equal(captured, multiply(x, weight, ids, 32)), f"another result with {high} matrices")
        expected = OPS["grouped_product"].reference(x.cpu(), weight.cpu(), ids.cpu(), 32)
        apart = float((captured.cpu().float() - expected.float()).abs().max() / expected.float().abs().max())
        require(apart < 0.02, f"{apart:.3g} of the largest value from the reference")
    return {}


def told(outputs: list[RequestOutput]) -> list[float]:
    return [
        ranked[token].logprob
        for output in outputs
        for token, ranked in zip(output.prompt_token_ids or (), output.prompt_logprobs or ())
        if ranked
    ]


@check(
    [
        (name, kind)
        for name in ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM")
        for kind in BOUNDS
        if DEVICE != "cpu" or kind != "fp8"
    ]
)
def experts_in_fewer_bits(architecture: str, kind: str) -> Figures:
    one, given, found = made(architecture), prompts(1, 7, 90, 170), []
    for quantization in (None, kind):
        with engine(one.folder, dtype="bfloat16", quantization=quantization) as llm:
            found.append(told(ask(llm, given, max_tokens=4, prompt_logprobs=0)))
    apart = sum(abs(a - b) for a, b in zip(*found)) / len(found[0])
    bound = BOUNDS[kind] * AMPLIFIED.get(architecture, 1.0)
    require(len(found[0]) > 200 and apart <= bound, f"{apart:.3g} apart in {len(found[0])} places")
    return {"mean |Δ|": apart}
