"""With adapters too, an answer has the same bits alone and in any company; a step without them makes today's calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from penstock.cache.radix import Root
from penstock.engine import sequence
from penstock.models.spec import FAMILIES
from penstock.ops.cpu.runtime.tape import Tape
from penstock.runner.cpu.runner import Runner
from tests.lora import adapters
from tests.lora.conftest import NUM_LORAS, Lab
from tests.models import oracle

NUM_PROMPTS, VOCABULARY = 24, 300
FORMATS: list[dict[str, Any]] = [{}, {"quantization": "int4", "kv_cache_dtype": "int8"}]


def make(lab: Lab, **options: Any) -> LLM:
    options = {"enable_lora": True, "device": "cpu", "max_model_len": 128, "progress": False, **options}
    return LLM(lab.base, **{"max_lora_rank": 64, "skip_tokenizer_init": True, **options})


def prompts() -> list[list[int]]:
    """Many share a beginning, whatever adapter they ask for."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCABULARY) for _ in range(50)]
    return [
        common[: rng.choice((0, 33, 50))] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 12))]
        for _ in range(NUM_PROMPTS)
    ]


def asked(lab: Lab) -> list[Any]:
    """Each adapter, none, and a sum, in turn."""
    kinds: list[Any] = [None, *(lab.lora(index) for index in range(NUM_LORAS)), [lab.lora(0, 0.5), lab.lora(1, -1.0)]]
    return [kinds[index % len(kinds)] for index in range(NUM_PROMPTS)]


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [dict(temperature=0.0), dict(temperature=1.0, seed=5), dict(seed=9, n=2, top_p=0.9)]
    return [SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True, **kinds[i % 3]) for i in range(NUM_PROMPTS)]


def read(output: RequestOutput) -> list[Any]:
    return [(one.token_ids, one.logprobs) for one in output.outputs]


@pytest.fixture(scope="module", params=FORMATS, ids=["dense", "int4"])
def expected(request: pytest.FixtureRequest, lab: Lab) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Each prompt by itself, from an empty cache, without speculation."""
    answers = []
    with make(lab, speculative_config="off", **request.param) as llm:
        for prompt, one, lora in zip(prompts(), params(), asked(lab)):
            llm.reset_prefix_cache()
            answers.append(read(llm.generate([prompt], one, lora_request=[lora], use_tqdm=False)[0]))
    yield request.param, answers


@pytest.mark.parametrize(
    "road",
    [
        dict(max_num_seqs=16),
        dict(max_num_seqs=8, max_loras=2, max_cpu_loras=2, max_num_batched_tokens=24),
        dict(max_num_seqs=6, kv_cache_tokens=160, max_loras=3, speculative_config="off"),
    ],
    ids=["together", "few slots, chunked", "preempted"],
)
def test_answers_do_not_depend_on_company(road: dict[str, Any], expected: Any, lab: Lab) -> None:
    options, answers = expected
    with make(lab, **options, **road) as llm:
        for _ in range(2):  # again with all prefixes cached
            outputs = llm.generate(prompts(), params(), lora_request=asked(lab), use_tqdm=False)
            llm.service.engine.scheduler.check()
            assert [read(output) for output in outputs] == answers
        if "kv_cache_tokens" in road:
            assert llm.stats()["num_preemptions"]
        if road.get("max_cpu_loras"):
            memory = llm.service.engine.loras.memory
            assert memory.num_evictions and len(memory) <= 2


def test_rows_without_adapters_keep_the_bits_of_a_model_without_any(lab: Lab) -> None:
    with make(lab, enable_lora=False) as llm:
        plain = [read(each) for each in llm.generate(prompts(), params(), use_tqdm=False)]
    loras = [None if index % 2 else lab.lora(index % NUM_LORAS) for index in range(NUM_PROMPTS)]
    with make(lab) as llm:
        mixed = [read(each) for each in llm.generate(prompts(), params(), lora_request=loras, use_tqdm=False)]
    assert [mixed[i] == plain[i] for i in range(NUM_PROMPTS)] == [i % 2 == 1 for i in range(NUM_PROMPTS)]


def calls(llm: LLM) -> dict[Any, list[str]]:
    runner = llm.service.engine.executor
    assert isinstance(runner, Runner) and not runner.tapes.obstacles
    known = runner.tapes._known.items()
    return {shape: [kernel.name for kernel in tape.kernels] for shape, tape in known if isinstance(tape, Tape)}


def test_steps_without_adapters_make_the_calls_of_a_model_without_any(lab: Lab) -> None:
    """And steps with adapters are taped too."""
    one = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with make(lab, enable_lora=False) as llm:
        llm.generate([[5, 6, 7]] * 2, one, use_tqdm=False)
        plain = calls(llm)
    with make(lab) as llm:
        llm.generate([[5, 6, 7]] * 2, one, use_tqdm=False)
        assert calls(llm) == plain != {}
        llm.generate([[8, 6, 7]] * 2, one, lora_request=[None, lab.lora(0)], use_tqdm=False)
        adapted = {shape: names for shape, names in calls(llm).items() if shape.has_adapters}
    assert adapted and all("add_lora" in names for names in adapted.values())


def share_across_adapters(lab: Lab) -> bool:
    """Return whether a prompt with an adapter finds another's prefix, or that of a former load of the same name."""
    prompt, one = [list(range(3, 60))], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    again = type(lab.lora(0))("lora-0", 99, lab.lora(0).lora_path)
    found = []
    with make(lab) as llm:
        for lora in (None, lab.lora(0), lab.lora(1), lab.lora(0, 0.5), [lab.lora(0), lab.lora(1)], again):
            found.append(llm.generate(prompt, one, lora_request=[lora], use_tqdm=False)[0].num_cached_tokens)
        own = llm.generate(prompt, one, lora_request=lab.lora(1), use_tqdm=False)[0].num_cached_tokens
    assert own, "an adapter's own prefix is not found"
    return any(found)


def test_a_prefix_is_never_shared_across_adapters(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not share_across_adapters(lab)
    monkeypatch.setattr(sequence, "Root", lambda salt, num_public, adapter: Root(salt, num_public))
    assert share_across_adapters(lab), "the planted bug was not seen"


def test_public_prefixes_are_shared_within_an_adapter_alone() -> None:
    assert Root("a", 16, "1*1.0").base == Root("b", 16, "1*1.0").base != Root("b", 16, "2*1.0").base


def test_structured_answers_keep_their_bits_in_company(lab: Lab) -> None:
    """Rows with grammars and adapters, alone and beside others, with drafts and without."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "yes": {"type": "boolean"}}, "required": ["n"]}
    guided = SamplingParams(
        temperature=1.0, seed=3, max_tokens=40, logprobs=1, structured_outputs=StructuredOutputsParams(json=schema)
    )
    loras = [lab.lora(0), None, lab.lora(1), [lab.lora(0, 0.5), lab.lora(3)]]
    found = []
    for draft in ("off", '{"method": "auto"}'):
        with make(lab, skip_tokenizer_init=False, speculative_config=draft) as llm:
            alone = [read(llm.generate(["the cat"], guided, lora_request=[one], use_tqdm=False)[0]) for one in loras]
            together = llm.generate(["the cat"] * 4, guided, lora_request=loras, use_tqdm=False)
            assert [read(one) for one in together] == alone
            found.append(alone)
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_embedding_models_take_adapters(tmp_path: Path) -> None:
    like = FAMILIES["BertModel"].like[0]
    model = oracle.make("BertModel", like)
    base = oracle.save(model, tmp_path / "base")
    pairs = adapters.make_pairs(model, 4, 1, ("query", "value"))
    folder = adapters.write(tmp_path / "lora", model, pairs, task_type="FEATURE_EXTRACTION")
    lora = LoRARequest("one", 1, str(folder))
    prompts = [[3, 5, 7, 9], [4, 4, 8]]
    options: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, progress=False, device="cpu")
    merged = oracle.save(adapters.merge(model, pairs, adapters.scale_of(16, 4)), tmp_path / "merged")
    with LLM(str(base), enable_lora=True, **options) as llm:
        plain, mixed = llm.embed(prompts, use_tqdm=False), llm.embed(prompts, lora_request=[lora, None], use_tqdm=False)
    with LLM(str(merged), **options) as llm:
        expected = llm.embed(prompts, use_tqdm=False)
    assert mixed[1].outputs.embedding == plain[1].outputs.embedding
    assert mixed[0].outputs.embedding == pytest.approx(expected[0].outputs.embedding, abs=1e-5)
    assert mixed[0].outputs.embedding != pytest.approx(plain[0].outputs.embedding, abs=1e-3)


def test_restored_prefixes_are_their_adapters_own(lab: Lab, tmp_path: Path) -> None:
    """In another process the same number is another adapter: blocks are named after its files."""
    prompt, own = prompts()[5] + list(range(3, 60)), params()[0]

    def ask(llm: LLM, index: int | None) -> RequestOutput:
        lora = None if index is None else lab.lora(index)
        return llm.generate([prompt], own, lora_request=lora, use_tqdm=False)[0]

    kept = {"kv_offloading_path": str(tmp_path / "kv")}
    with make(lab, enable_prefix_caching=False) as cold:
        expected = {index: read(ask(cold, index)) for index in (None, 0, 3)}
    assert len({repr(one) for one in expected.values()}) == 3
    with make(lab, **kept) as first:
        for index in (None, 0, 3):
            assert read(ask(first, index)) == expected[index]
    with make(lab, **kept) as later:
        for index in (3, None, 0, 1):
            output = ask(later, index)
            assert (output.num_cached_tokens > 0) == (index != 1), "never saved"
            assert index == 1 or read(output) == expected[index]
        assert later.stats()["num_restored_tokens"] > 3 * 48
