"""One set of sampling defaults: where each value comes from, what the user may set, and the reason that is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.api.defaults import Defaults, find_defaults, from_wire
from penstock.commands.flags.config_file import read_options
from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
from penstock.hub.recommended import find_recommended
from penstock.server.ollama.bodies import OLLAMA_DEFAULTS
from tests.llm import tiny

SMOLLM2 = {
    "general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2",
    "general.basename": "smollm2",
    "general.size_label": "135M",
}
GEMMA3 = {"general.name": "Gemma 3 270m", "general.basename": "gemma-3", "general.size_label": "270M"}
OTHER = {"general.name": "Qwen3 0.6B", "general.architecture": "qwen3"}
LLAMA_SERVER = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}


def defaults_of(
    found: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **options: Any
) -> Defaults:
    return find_defaults(EngineConfig.from_options(**options), found or {}, metadata)


def values_of(defaults: Defaults) -> dict[str, Any]:
    return {one.name: one.value for one in defaults.settings}


def why(defaults: Defaults, name: str) -> str:
    return next(one.why for one in defaults.settings if one.name == name)


def test_the_files_own_values_come_first() -> None:
    folder = defaults_of({"temperature": 0.6, "top_k": 20})
    assert (folder.params.temperature, folder.params.top_k, folder.params.top_p) == (0.6, 20, 1.0)
    assert why(folder, "temperature") == "generation_config.json" and why(folder, "top_p") == "neutral"
    gguf = defaults_of({"temperature": 0.6, "eos_token_id": [2]}, SMOLLM2)
    assert (gguf.params.temperature, gguf.params.top_p) == (0.6, 1.0), "a set is taken whole"
    assert why(gguf, "temperature") == "general.sampling of the GGUF file"
    rare = defaults_of({"repetition_penalty": 1.2, "repeat_last_n": 64}, OTHER)
    assert rare.params == SamplingParams(repetition_penalty=1.2, repeat_last_n=64)


def test_then_those_kept_with_the_short_names_then_llama_cpps() -> None:
    smollm2, gemma3, other = (defaults_of({}, metadata) for metadata in (SMOLLM2, GEMMA3, OTHER))
    assert (smollm2.params.temperature, why(smollm2, "temperature")) == (0.2, "recommended for smollm2")
    assert (gemma3.params.temperature, gemma3.params.top_k, gemma3.params.top_p) == (1.0, 64, 0.95)
    assert values_of(other).items() >= LLAMA_SERVER.items() and "llama.cpp" in why(other, "top_k")
    assert smollm2.is_recommended and gemma3.is_recommended and not other.is_recommended
    bare = defaults_of()
    assert bare.params == SamplingParams() and "recommends none" in why(bare, "temperature")


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"general.name": "SmolLM2 135M Instruct"}, "smollm2"),
        ({"general.name": "SmolLM2 1.7B Instruct", "general.size_label": "1.7B"}, "SmolLM2"),
        ({"general.name": "Gemma-3-12b-it"}, "Gemma 3"),
        ({"general.name": "Smollm3 3B"}, None),
        ({"general.name": "Llama 3 gemma3"}, None),
        ({"general.name": 7}, None),
        ({}, None),
    ],
)
def test_a_model_is_known_by_the_name_in_its_file(metadata: dict[str, Any], name: str | None) -> None:
    found = find_recommended(metadata)
    assert (found.name if found else None) == name


def test_options_as_vllms() -> None:
    neutral = defaults_of({"temperature": 0.6}, SMOLLM2, generation_config="vllm")
    assert neutral.params == SamplingParams() and not neutral.is_recommended
    only = defaults_of({"temperature": 0.6}, generation_config="vllm", override_generation_config={"top_k": 9})
    assert only.params == SamplingParams(top_k=9)
    merged = defaults_of({"temperature": 0.6, "top_k": 20}, override_generation_config='{"temperature": 0.5}')
    assert (merged.params.temperature, merged.params.top_k) == (0.5, 20)
    assert why(merged, "temperature") == "override_generation_config"
    without = defaults_of({"temperature": 0.6, "top_k": 20}, override_generation_config={"top_k": None})
    assert (without.params.temperature, without.params.top_k) == (0.6, 0)
    limited = defaults_of(override_generation_config={"max_new_tokens": 5})
    assert limited.max_tokens == limited.params.max_tokens == 5 and defaults_of().max_tokens is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("warm", "JSON object"),
        ("[1]", "JSON object"),
        ({"temprature": 1}, "temperature, top_k"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": -1}, "0 or more"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"do_sample": False}, "has no 'do_sample'"),
        (7, "must be a string"),
    ],
)
def test_bad_overrides_are_refused_before_anything_is_loaded(value: Any, words: str) -> None:
    with pytest.raises(InvalidConfig, match="override_generation_config") as refused:
        EngineConfig.from_options(override_generation_config=value)
    assert words in str(refused.value)


def test_a_file_of_options_has_them_too(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("generation-config: vllm\noverride-generation-config:\n  temperature: 0.5\n")
    engine = read_options(str(file))[1]
    assert find_defaults(EngineConfig.from_options(**engine), {}, None).params == SamplingParams(temperature=0.5)


def test_an_apis_own_values_hold_where_the_model_recommends_none() -> None:
    assert defaults_of({}, SMOLLM2).yield_to(OLLAMA_DEFAULTS) == {}
    assert defaults_of({"top_k": 20}).yield_to(OLLAMA_DEFAULTS) == {}
    for free in (defaults_of({}, OTHER), defaults_of(), defaults_of({}, SMOLLM2, generation_config="vllm")):
        assert free.yield_to(OLLAMA_DEFAULTS) == OLLAMA_DEFAULTS
    assert "temperature" not in defaults_of({}, OTHER, override_generation_config={"temperature": 0}).yield_to(
        OLLAMA_DEFAULTS
    )


def test_they_survive_the_wire() -> None:
    found = defaults_of({}, SMOLLM2)
    assert from_wire([(one.name, one.value, one.why) for one in found.settings], found.is_recommended) == found


def test_the_llm_takes_them(tmp_path: Path) -> None:
    folder = Path(tiny.write_config(tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 3}')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "generation_config.json").write_text('{"temperature": 0.3, "max_new_tokens": 4, "eos_token_id": 9}')
    with tiny.dummy(str(folder), override_generation_config={"top_k": 5}) as model:
        assert model.default_sampling_params() == SamplingParams(temperature=0.6, top_k=5)
    with tiny.dummy(str(folder), generation_config="vllm") as model:
        assert model.default_sampling_params() == SamplingParams() and model.service.intake.eos_token_ids == (3,)
    with tiny.dummy(str(folder), generation_config=str(elsewhere)) as model:
        params = model.default_sampling_params()
        assert (params.temperature, params.max_tokens, model.service.intake.eos_token_ids) == (0.3, 4, (9,))
        ignoring = SamplingParams(max_tokens=6, ignore_eos=True)
        assert len(model.generate([1, 2], ignoring, use_tqdm=False)[0].outputs[0].token_ids) == 6
    for wrong in ("", "auot", str(elsewhere / "generation_config.json")):
        with pytest.raises(InvalidConfig, match=r"no folder with a generation_config\.json: name one, or give auto"):
            tiny.dummy(str(folder), generation_config=wrong)


def test_smollm2_answers_with_its_recommended_values() -> None:
    """Twenty seeds without a temperature; sampled freely, seven of twenty name Paris."""
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM("smollm2", progress=False) as llm:
        assert llm.service.assembly.defaults.is_recommended
        own = llm.default_sampling_params().clone(max_tokens=24)
        outputs = llm.chat([ask] * 20, [own.clone(seed=seed) for seed in range(20)], use_tqdm=False)
    assert sum("Paris" in output.outputs[0].text for output in outputs) >= 18
