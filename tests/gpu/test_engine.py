"""The engine on a GPU against transformers, and against itself along other roads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.types import RequestOutput  # noqa: E402

SIZES: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
                         "max_position_embeddings": 2048}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "Qwen3Config": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}}
PROMPTS = [[(7 * i + j * j) % 1000 for j in range(5 + 37 * i)] for i in range(9)]
LENGTH = 40


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, request.param)(**SIZES, **KINDS[request.param])
    made = transformers.AutoModelForCausalLM.from_config(config).float()
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    yield folder, made.cuda()


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, gpu_memory_utilization=0.2, progress=False, **options)


def answers(llm: LLM, prompts: list[list[int]], **sampling: Any) -> list[RequestOutput]:
    params = SamplingParams(**({"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True} | sampling))
    return llm.generate(prompts, params, use_tqdm=False)       # type: ignore[arg-type]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def log_probabilities(oracle: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + answer[:-1]], device="cuda")).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1:].float(), -1)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 1.0, 1e-5), ("bfloat16", 0.97, 0.02)])
def test_agrees_with_transformers(model: tuple[Path, Any], dtype: str, least: float, most: float, eager: bool) -> None:
    """Greedy tokens are the oracle's own choice after the same beginning; log probabilities are near."""
    folder, oracle = model
    with engine(folder, dtype=dtype, enforce_eager=eager) as llm:
        outputs, told = answers(llm, PROMPTS), answers(llm, PROMPTS, logprobs=1)
    same, differences = 0, []
    for prompt, answer, output in zip(PROMPTS, ids(outputs), told):
        assert len(answer) == LENGTH
        expected = log_probabilities(oracle, prompt, answer)
        same += sum(a == b for a, b in zip(answer, expected.argmax(-1).tolist()))
        for at, (token, found) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs or ())):
            if output.outputs[0].token_ids[:at] == answer[:at]:
                differences.append(abs(found[token].logprob - expected[at, token].item()))
    assert same >= least * LENGTH * len(PROMPTS)
    assert sum(differences) / len(differences) <= most


def test_a_shared_prefix_changes_nothing(model: tuple[Path, Any]) -> None:
    """40 sequences with 600 tokens in common, which are read once for all, and each alone."""
    common = [(j * j) % 1000 for j in range(600)]
    prompts = [common + [(i * 31 + j) % 1000 for j in range(5 + i)] for i in range(40)]
    with engine(model[0], dtype="float32") as llm:
        answers(llm, prompts[:1])
        together = ids(answers(llm, prompts))
        alone = [ids(answers(llm, [prompt]))[0] for prompt in prompts[:8]]
    assert together[:8] == alone


def test_draws_follow_from_seed_and_position(model: tuple[Path, Any]) -> None:
    with engine(model[0], dtype="float32") as llm:
        first, second = (ids(answers(llm, PROMPTS, temperature=1.0, seed=5)) for _ in range(2))
        other = ids(answers(llm, PROMPTS, temperature=1.0, seed=6))
        alone = [ids(answers(llm, [prompt], temperature=1.0, seed=5))[0] for prompt in PROMPTS]
    assert first == second == alone and first != other


def test_what_the_host_chooses_goes_along_with_what_the_device_chooses(model: tuple[Path, Any]) -> None:
    """Filters, penalties and masks beside plain rows, none of which change for it."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"repetition_penalty": 1.3}, {"allowed_token_ids": [3, 4, 5]},
                                   {"logprobs": 2}, {"prompt_logprobs": 1}, {"min_p": 0.2}]
    params = [SamplingParams(**({"temperature": 0.8, "seed": 7, "max_tokens": 20, "ignore_eos": True} | kind))
              for kind in kinds]
    with engine(model[0], dtype="float32") as llm:
        together = ids(llm.generate([PROMPTS[3]] * len(kinds), params, use_tqdm=False))     # type: ignore[arg-type]
        alone = [ids(llm.generate([PROMPTS[3]], one, use_tqdm=False))[0] for one in params]  # type: ignore[arg-type]
    assert together == alone and set(together[3]) <= {3, 4, 5}
