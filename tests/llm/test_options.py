"""Engine options change how the work is cut up, never what comes out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.config import CAPACITIES, POLICIES
from tests.llm import tiny

SHARED = list(range(100, 124))
PROMPTS = [[1], [2] * 17, [*SHARED, 3], [*SHARED, 4, 5], list(range(50)), [7, 8, 9], [*SHARED, 3, 1], [6] * 33]
PARAMS = [
    SamplingParams(max_tokens=20 + i, temperature=i % 2, seed=i, logprobs=1, ignore_eos=True)
    for i in range(len(PROMPTS))
]
STATS = {
    "num_requests",
    "num_refused",
    "num_aborted",
    "num_failed",
    "num_steps",
    "num_failed_steps",
    "max_batch_size",
    "num_computed_tokens",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "num_forks",
    "num_running",
    "num_waiting",
    "num_evicted_blocks",
    "num_copied_blocks",
    "num_blocks",
    "num_used_blocks",
    "num_cached_blocks",
}


def run(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=list(range(len(PROMPTS)))[::-1])
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def expected(config_folder: str) -> list[Any]:
    """One at a time, no cache."""
    with tiny.dummy(config_folder, max_num_seqs=1, enable_prefix_caching=False) as model:
        return run(model)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_num_batched_tokens=1),
        dict(max_num_batched_tokens=3, max_num_seqs=8),
        dict(max_num_seqs=2),
        dict(block_size=1),
        dict(block_size=8),
        dict(block_size=256),
        dict(enable_prefix_caching=False),
        dict(threads=2),
        dict(kv_cache_tokens=80, max_model_len=80, block_size=8),
        *(
            dict(scheduling_policy=policy, capacity=capacity, kv_cache_tokens=128, block_size=8, max_num_seqs=4)
            for policy in POLICIES
            for capacity in CAPACITIES
        ),
    ],
    ids=str,
)
def test_answers_do_not_depend_on_it(config_folder: str, expected: list[Any], options: dict[str, Any]) -> None:
    with tiny.dummy(config_folder, **options) as model:
        assert run(model) == expected
        stats = model.stats()
        assert stats["num_output_tokens"] == sum(len(ids) for ids, _ in expected)
        assert stats["max_batch_size"] <= options.get("max_num_seqs", 64)
        assert stats["max_batch_size"] <= options.get("max_num_batched_tokens", 512)
        if options.get("max_num_batched_tokens") == 1:
            assert stats["num_steps"] == stats["num_computed_tokens"]
        if options.get("capacity") == "reserve":
            assert stats["num_preemptions"] == 0
        elif "kv_cache_tokens" in options:
            assert stats["num_preemptions"] > 0
        assert stats["num_used_blocks"] == 0
        model.service.engine.scheduler.check()


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        ("dtype", "bfloat16"),
        ("dtype", "float16"),
        ("kv_cache_dtype", "bfloat16"),
        ("kv_cache_dtype", "float16"),
        ("kv_cache_dtype", "int8"),
    ],
)
def test_half_precision_is_near(config_folder: str, option: str, dtype: str) -> None:
    """Other numbers, yet nearly the same distribution; the log probabilities of one prompt say how near."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    values: dict[str, list[float]] = {}
    for name in ("float32", dtype):
        with tiny.dummy(config_folder, **{option: name}) as model:
            assert {setting.name: setting.value for setting in model.settings}[option] == name
            found = model.generate(PROMPTS[4], params, use_tqdm=False)[0].prompt_logprobs
            assert found is not None
            values[name] = [next(iter(position.values())).logprob for position in found if position]
            assert run(model)
    differences = [abs(a - b) for a, b in zip(values["float32"], values[dtype])]
    assert 0 < max(differences) < 1.5 and sum(differences) / len(differences) < 0.2


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.1), ("int4", 0.5)])
def test_quantizing_at_load_is_near(config_folder: str, quantization: str, share: float) -> None:
    """The tiny model amplifies every rounding: how near is measured against a model of other weights."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    values: list[list[float]] = []
    options: list[dict[str, Any]] = [
        {},
        dict(seed=1),
        dict(quantization=quantization),
        dict(quantization=quantization, activation_dtype="float32"),
    ]
    for each in options:
        with tiny.dummy(config_folder, **each) as model:
            found = model.generate(PROMPTS[4], params, use_tqdm=False)[0].prompt_logprobs
            assert found is not None
            values.append([next(iter(position.values())).logprob for position in found if position])
    dense, stranger, integer, floats = values
    apart = [sum(abs(a - b) for a, b in zip(dense, other)) for other in (stranger, integer, floats)]
    assert integer != floats and 0 < apart[1] < share * apart[0] and 0 < apart[2] < share * apart[0]


def test_stats(config_folder: str) -> None:
    with tiny.dummy(config_folder, block_size=8, kv_cache_tokens=64) as model:
        stats = model.stats()
        assert set(stats) >= STATS and stats["num_blocks"] == 8
        assert all(type(value) is (float if name.endswith("_s") else int) for name, value in stats.items())
        assert not any(stats[name] for name in STATS - {"num_blocks"})
        model.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        stats = model.stats()
        assert (stats["num_requests"], stats["max_batch_size"], stats["num_output_tokens"]) == (2, 2, 10)
        assert (stats["num_steps"], stats["num_computed_tokens"], stats["num_prompt_tokens"]) == (5, 3 + 1 + 8, 4)
        model.generate([list(range(i, i + 40)) for i in range(4)], SamplingParams(max_tokens=2), use_tqdm=False)
        assert model.stats()["num_evicted_blocks"] > 0
        cached = model.stats()["num_cached_blocks"]
        assert cached > 0
        model.reset_prefix_cache()
        assert model.stats()["num_cached_blocks"] == 0


def test_num_cached_tokens(config_folder: str) -> None:
    """Whole blocks, never the last token, per request and in sum."""
    greedy = SamplingParams(temperature=0, max_tokens=1)
    with tiny.dummy(config_folder, block_size=8) as model:

        def cached(prompt: list[int]) -> int:
            return model.generate(prompt, greedy, use_tqdm=False)[0].num_cached_tokens

        found = [cached(prompt) for prompt in (SHARED, SHARED, [*SHARED, 1], SHARED[:9], [0, *SHARED], SHARED[:16])]
        assert found == [0, 16, 24, 8, 0, 8]
        assert model.stats()["num_cached_tokens"] == sum(found)
        together = model.generate([[9] * 20] * 3, greedy, use_tqdm=False)
        assert [output.num_cached_tokens for output in together] == [0, 16, 16], "the prefix is computed once"
        answer = model.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0]
        assert cached([5, 6, 7, *answer.token_ids, 1]) == 32, "answers are cached too"
    with tiny.dummy(config_folder, enable_prefix_caching=False) as model:
        assert [cached(SHARED) for _ in range(2)] == [0, 0]


def test_settings_say_why(config_folder: str) -> None:
    with LLM(config_folder, load_format="dummy", skip_tokenizer_init=True, progress=False, max_num_seqs=7) as model:
        settings = {setting.name: setting for setting in model.settings}
        assert (settings["max_num_seqs"].value, settings["max_num_seqs"].why) == (7, "set by the user")
        assert settings["block_size"].why == "default"
        assert (settings["max_model_len"].value, settings["max_model_len"].why) == (128, "the model's context")
        assert settings["kv_cache_tokens"].value >= 4 * 128
        unset = {setting.name for setting in model.settings if setting.value is None}
        measured = {"ttft_slo_ms", "tpot_slo_ms", "kv_offloading_path"}
        named = {"tokenizer", "chat_template", "revision", "quantization", "override_generation_config"}
        named |= {"distributed_secret_file", "max_cpu_loras", "kv_cache_dtype_skip_layers"}
        named |= {f"distributed_tls_{part}" for part in ("certfile", "keyfile", "ca")}
        assert unset == named | measured


def test_tokenizer_of_another_model(text_folder: str, tmp_path: Path) -> None:
    """A config alone, with a tokenizer from elsewhere."""
    folder = tiny.write_config(tmp_path / "model", vocab_size=300)
    with tiny.dummy(folder, skip_tokenizer_init=False, tokenizer=text_folder) as model:
        output = model.generate("the cat", SamplingParams(max_tokens=3), use_tqdm=False)[0]
        assert output.prompt_token_ids == tiny.tokenizer().encode("the cat").ids


def test_window_model_holds_few_blocks(tmp_path: Path) -> None:
    """A sliding window of 8 gives its old blocks back while a long answer is made."""
    folder = tiny.write_config(tmp_path / "model", "MistralForCausalLM", sliding_window=8, max_position_embeddings=256)
    with tiny.dummy(folder, block_size=4, kv_cache_tokens=256) as model:
        used = []
        for _ in model.stream([1, 2, 3], SamplingParams(max_tokens=120, ignore_eos=True)):
            used.append(model.stats()["num_used_blocks"])
        assert len(used) == 120 and max(used) <= 5
