"""Bitwise equal answers on quantized folders: asymmetric codes whose inputs are reordered, and NF4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.passes.lower import LoweredBlock
from penstock.quant.packed import Packed
from penstock.quant.permuted import Permuted
from tests.models.oracle import make, save
from tests.quant import other_writers as others
from tests.quant.test_folders import LIKE
from tests.quant.writers import quantize_folder
from tests.same_tokens.roads import Answer, alone, chunked, displaced, drafted, shuffled, together
from tests.same_tokens.test_tiny import params as many_params
from tests.same_tokens.test_tiny import prompts as many_prompts

METHODS = {
    "gptq": others.gptq(4, 32, symmetric=False, order=True),
    "nf4": others.bitsandbytes("nf4"),
    "fp8": others.fp8("block"),
    "hqq": others.hqq(4, 64),
}
NUM_PROMPTS = 16


def prompts() -> list[list[int]]:
    return many_prompts()[:NUM_PROMPTS]


def params() -> list[SamplingParams]:
    return many_params()[:NUM_PROMPTS]


def make_llm(folder: Path, **options: Any) -> LLM:
    options = {"kv_cache_tokens": 4096, "speculative_config": None, **options}
    return LLM(str(folder), skip_tokenizer_init=True, progress=False, **options)


@pytest.fixture(scope="module", params=METHODS)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, LLM, list[Answer]]]:
    folder = tmp_path_factory.mktemp(request.param)
    plain = save(make("LlamaForCausalLM", LIKE, spread=0.3), folder / "plain")
    quantize_folder(plain, folder / "quantized", METHODS[request.param])
    with make_llm(folder / "quantized") as llm:
        linears = llm.service.engine.executor.model.blocks[0].ffn.linears()  # type: ignore[attr-defined]
        kind = Permuted if request.param == "gptq" else Packed
        assert all(isinstance(linear.scheme, kind) for _, linear in linears)
        yield folder / "quantized", llm, alone(llm, prompts(), params())


def test_any_order_and_chunks(known: tuple[Path, LLM, list[Answer]]) -> None:
    _, llm, answers = known
    assert len({tokens for tokens, _ in answers}) > NUM_PROMPTS // 2
    for found in (shuffled(llm, prompts(), params(), seed=1), chunked(llm, prompts(), params(), seed=2)):
        assert found == answers
        llm.reset_prefix_cache()


def test_drafted(known: tuple[Path, LLM, list[Answer]]) -> None:
    _, llm, answers = known
    assert drafted(llm, prompts(), params(), answers) == answers


def test_displaced_with_one_thread(known: tuple[Path, LLM, list[Answer]]) -> None:
    with make_llm(known[0], scheduling_policy="priority", max_num_seqs=4, threads=1) as small:
        assert displaced(small, prompts(), params()) == known[2]


def test_plain_layers(known: tuple[Path, LLM, list[Answer]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PLAIN", "1")
    with make_llm(known[0]) as plain:
        runner: Any = plain.service.engine.executor
        assert not any(isinstance(block, LoweredBlock) for block in runner.model.blocks)
        assert together(plain, prompts(), params()) == known[2]


def test_steps_are_replayed(known: tuple[Path, LLM, list[Answer]]) -> None:
    runner: Any = known[1].service.engine.executor
    assert not runner.tapes.obstacles
