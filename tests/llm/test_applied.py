"""The ledger in Python: what was applied to a request, and if the same request gives the same bits again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.api.applied import describe_weights, list_static
from penstock.config import EngineConfig, Facts, GpuFacts, resolve
from penstock.models.files import open_checkpoint
from penstock.text.ledger import DraftCounts, format_ledger
from penstock.types import Applied, DraftCount, RequestOutput
from tests.llm import tiny
from tests.models.oracle import make, save
from tests.quant import writers
from tests.quant.test_folders import LIKE, METHODS
from tests.same_tokens.roads import Always

GIB = 1 << 30
GPU = GpuFacts("a GPU", 80 * GIB, 80 * GIB, GIB, 1 << 16, 1000)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=512)
    tiny.write_tokenizer(folder)
    with LLM(str(folder), load_format="dummy", threads=1, progress=False, draft_fn=lambda tokens: tokens[-2:]) as made:
        yield made


def ask(llm: LLM, prompt: str = "one two one two", **more: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0, **more})
    return llm.generate(prompt, params, use_tqdm=False)[0]


def values(output: RequestOutput) -> dict[str, Any]:
    return {one.kind: one.value for one in output.applied}


def test_a_greedy_answer_is_exact(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.service.engine.scheduler, "_speculation", Always())
    output = ask(llm, ignore_eos=True)
    found = values(output)
    assert output.exact and found["weights"] == "dummy" and found["kv_cache"] == "float16"
    assert found["kernels"].startswith("cpu ") and not found.keys() & {"truncation", "seed", "forced_closing"}
    drafts = [one.value for one in output.applied if one.kind == "drafts"]
    assert drafts and all(0 <= one["accepted"] <= one["verified"] > 0 for one in drafts)


def test_a_drawn_seed_is_told_and_gives_the_same_again(llm: LLM) -> None:
    first = ask(llm, temperature=1.0, ignore_eos=True)
    assert not first.exact
    again = ask(llm, temperature=1.0, ignore_eos=True, seed=values(first)["seed"])
    assert again.exact and "seed" not in values(again)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_what_a_request_brings_is_told(llm: LLM) -> None:
    assert values(ask(llm, truncate_prompt_tokens=3))["truncation"] == {"tokens": 6, "messages": 0}
    processed = ask(llm, logits_processors=[lambda tokens, logits: logits])
    assert not processed.exact and values(processed)["logits_processors"] == 1
    assert not [one for one in ask(llm, speculation=False).applied if one.kind == "drafts"]
    closed = ask(llm, structured_outputs=StructuredOutputsParams(json={"type": "string", "minLength": 5}))
    assert closed.outputs[0].forced_closing and values(closed)["forced_closing"] == [0]


def test_a_stream_ends_with_it(llm: LLM) -> None:
    *before, last = llm.stream("one two", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert last.applied and not any(one.applied for one in before)


@pytest.mark.parametrize("deterministic", [True, False])
def test_fast_kernels_of_a_gpu_are_not_exact(deterministic: bool) -> None:
    facts = Facts(4096, 1024, 8 * GIB, 2, gpu=GPU)
    settings = resolve(EngineConfig(device="cuda", deterministic=deterministic), facts)
    *_, kernels = list_static(settings, "bfloat16", 0.0, True)
    assert kernels.exact is deterministic and kernels.value.endswith("deterministic" if deterministic else "fast")


@pytest.mark.parametrize(
    ("options", "packed", "weights", "rounds"),
    [
        ({}, 0.0, "Q4_1", False),
        ({}, 1.0, "Q4_1", True),
        ({"activation_dtype": "float32"}, 1.0, "Q4_1", False),
        ({"dtype": "float32"}, 1.0, "Q4_1 as float32", False),
        ({"quantization": "int8"}, 0.0, "Q4_1 as int8", True),
        ({"quantization": "int8"}, 1.0, "Q4_1", True),
    ],
)
def test_storage_is_named(options: dict[str, Any], packed: float, weights: str, rounds: bool) -> None:
    settings = resolve(EngineConfig(device="cpu", **options), Facts(4096, 1024, 8 * GIB, 2))
    found = {one.kind: one.value for one in list_static(settings, "Q4_1", packed, True)}
    assert found["weights"] == weights and ("activations" in found) is rounds


@pytest.mark.parametrize(
    ("method", "options", "has_fp8", "weights"),
    [
        ("gptq 4 g32", {}, True, "gptq int4 g32 with float16 scales"),
        ("gptq 4 g32", {"deterministic": True}, True, "gptq int4 g32 with float16 scales"),
        ("gptq 4 g32", {"dtype": "float16"}, True, "gptq int4 g32 as float16"),
        ("gptq 4 g32", {"quantization": "fp8"}, True, "gptq int4 g32 as fp8"),
        ("nf4", {}, True, "bitsandbytes nf4 as bfloat16"),
        ("fp8 block", {}, True, "fp8"),
        ("fp8 block", {}, False, "fp8 as bfloat16"),
        ("fp8 block", {"quantization": "fp8"}, True, "fp8"),
        ("fp8 block", {"quantization": "int4"}, True, "fp8 as int4"),
        ("hqq 8", {}, True, "hqq int8 g64 as bfloat16"),
    ],
)
def test_a_gpu_says_what_it_made_of_a_folder(
    method: str, options: dict[str, Any], has_fp8: bool, weights: str, tmp_path: Path
) -> None:
    plain = save(make("LlamaForCausalLM", LIKE), tmp_path / "plain")
    writers.quantize_folder(plain, tmp_path / "quantized", METHODS[method])
    settings = resolve(EngineConfig(device="cuda", **options), Facts(4096, 1024, 8 * GIB, 2, gpu=GPU))
    named = describe_weights(open_checkpoint(tmp_path / "quantized"), settings, has_fp8)
    found = {one.kind: one.value for one in list_static(settings, named, 1.0, True)}
    assert found["weights"] == weights
    if not options:
        assert describe_weights(open_checkpoint(plain), settings) == "float32 as bfloat16"


def test_rounded_levels_are_told_beside_other_kinds() -> None:
    settings = resolve(EngineConfig(device="cpu"), Facts(4096, 1024, 8 * GIB, 2))
    found = {one.kind: one.value for one in list_static(settings, "bitsandbytes nf4, int8", 1.0, True)}
    assert found["weights"] == "bitsandbytes nf4, int8, levels rounded to 8 bits"


def test_entries_of_several_prompts_are_joined() -> None:
    found = format_ledger([Applied("a", 1), Applied("a", 1), Applied("b", [2], exact=False)])
    assert found == {
        "exact": False,
        "applied": [{"kind": "a", "value": 1}, {"kind": "b", "value": [2], "exact": False}],
    }
    drafts = [Applied("drafts", {"drafter": "x", "verified": 3, "accepted": 1})] * 2
    value = {"drafter": "x", "verified": 6, "accepted": 2}
    assert format_ledger(drafts) == {"exact": True, "applied": [{"kind": "drafts", "value": value}]}
    counts = DraftCounts()
    counts.add([DraftCount("x", 3, 1)])
    counts.add([DraftCount("x", 2, 2), DraftCount("a", 1, 0)])
    assert counts.list_all() == [("a", 1, 0), ("x", 5, 3)]
