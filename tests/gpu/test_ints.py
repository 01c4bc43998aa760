"""Weights of integers on a GPU: near transformers with the same weights, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

from penstock.ops.int_product import widened  # noqa: E402
from penstock.quant.ints import Ints  # noqa: E402
from penstock.quant.packed import pack  # noqa: E402
from penstock.quant.rounding import quantize  # noqa: E402
from tests.gpu.test_engine import LENGTH, PROMPTS, SIZES, answers, engine, ids, log_probabilities  # noqa: E402
from tests.ops.check import same_bits  # noqa: E402

KINDS = ["int8", "int4"]


def meant(weight: torch.Tensor, kind: str) -> torch.Tensor:
    made = Ints(weight, None, kind, torch.float32)
    return widened(made.words, made.scales, weight.shape[1])


@pytest.fixture(scope="module", params=[(kind, tied) for kind in KINDS for tied in (False, True)],
                ids=lambda param: f"{param[0]}-{'tied' if param[1] else 'untied'}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A checkpoint, and transformers' model of it with its matrices rounded as ours are."""
    import transformers

    kind, tied = request.param
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
                                      tie_word_embeddings=tied)
    made = transformers.AutoModelForCausalLM.from_config(config).float()
    folder = tmp_path_factory.mktemp("ints")
    made.save_pretrained(folder)
    made = made.cuda()
    with torch.no_grad():
        for name, parameter in made.named_parameters():      # a tied matrix once
            if parameter.ndim == 2:
                outer = "embed_tokens" in name or "lm_head" in name
                parameter.copy_(meant(parameter, "int8" if outer else kind))
    return kind, folder, made


@pytest.mark.parametrize(("dtype", "eager", "least", "most"), [
    ("float32", False, 0.99, 1e-4), ("bfloat16", True, 0.95, 0.03), ("bfloat16", False, 0.95, 0.03)])
def test_agrees_with_the_same_weights(model: tuple[str, Path, Any], dtype: str, eager: bool, least: float, most: float,
                                      ) -> None:
    """Greedy tokens after the same beginning, and their log probabilities, over every tile of rows."""
    kind, folder, oracle = model
    with engine(folder, dtype=dtype, quantization=kind, enforce_eager=eager) as llm:
        for num_rows in (1, 9, 24, 50, 100, 200):
            prompts = [[(token + i) % 1000 for token in PROMPTS[i % len(PROMPTS)]] for i in range(num_rows)]
            told = answers(llm, prompts, logprobs=1)
            pairs = list(zip(prompts, ids(answers(llm, prompts))))
            same, seen, differences = 0, [*pairs[:6], *pairs[6:][-3:]], []
            for prompt, answer in seen:
                assert len(answer) == LENGTH
                chosen = log_probabilities(oracle, prompt, answer).argmax(-1).tolist()
                same += sum(a == b for a, b in zip(answer, chosen))
            for prompt, output in list(zip(prompts, told))[:3]:
                answer = output.outputs[0].token_ids
                expected = log_probabilities(oracle, prompt, answer)
                differences += [abs(found[token].logprob - expected[at, token].item())
                                for at, (token, found) in enumerate(zip(answer, output.outputs[0].logprobs or ()))]
            assert same >= least * LENGTH * len(seen), num_rows
            assert sum(differences) / len(differences) <= most, num_rows


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_on_a_gpu_is_a_cpus(kind: str) -> None:
    """Scales and codes are the same but where two ranges fit a group of 4 bits equally well."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)) * 0.02
    ours, theirs = meant(weight.cuda(), kind).cpu(), pack([quantize(weight, kind)]).unpacked()
    if kind == "int8":
        assert same_bits(ours, theirs)
    assert (ours != theirs).float().mean() < 1e-3 and (ours - theirs).abs().max() < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 5, 32, 64, 128, 256, 600])
def test_products_of_the_sizes_of_a_model(kind: str, num_rows: int) -> None:
    weight = torch.randn(6144, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 0.02
    scheme, exact = Ints(weight, None, kind, torch.bfloat16), meant(weight, kind)
    x = torch.randn(num_rows, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    near, expected = scheme.matmul(x).float(), x.float() @ exact.T
    assert (near - expected).norm() / expected.norm() < 5e-3
    gate, up = expected.chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    assert (scheme.gated(x, "silu").float() - gated).norm() / gated.norm() < 1e-2
