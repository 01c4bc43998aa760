"""Layers that kv_cache_dtype_skip_layers names keep keys and values in full; the others are quantized as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import SamplingParams
from penstock.api.assemble import bytes_per_token
from penstock.api.engine.keep import keep_layers
from penstock.cli import main
from penstock.commands.flags.spelling import join_layers
from penstock.config import EngineConfig
from penstock.config.cache_dtypes import parse_skips
from penstock.errors import InvalidConfig
from penstock.models.spec import FAMILIES, spec_from_config
from tests.llm import tiny

PROMPT = [(7 * at * at + 3 * at + 1) % 90 + 3 for at in range(60)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
GEMMA = "Gemma3ForCausalLM"
TORCH = {"int8": torch.int8, "int4": torch.uint8}


def ask(folder: str, **options: Any) -> Any:
    """The answer to the last bit, what each layer's keys are stored as, and the ledger's entry."""
    with tiny.dummy(folder, **options) as llm:
        answer = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0]
        caches = tiny.runner(llm.service).caches
        told = next(one.value for one in llm.service.assembly.applied if one.kind == "kv_cache")
        assert all((cache.k_scale is None) == (cache.k.dtype not in TORCH.values()) for cache in caches)
        places = [{token: found.logprob for token, found in place.items()} for place in answer.logprobs or ()]
        return (tuple(answer.token_ids), places), [cache.k.dtype for cache in caches], told


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_config(tmp_path_factory.mktemp("skip"), GEMMA)


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_each_layer_has_its_dtype(gemma: str, kept: str) -> None:
    windows = [layer.mixer.window > 0 for layer in _spec(GEMMA).layers]
    assert True in windows and False in windows
    full, whole = (ask(gemma, kv_cache_dtype=dtype)[0] for dtype in ("float16", kept))
    some, dtypes, told = ask(gemma, kv_cache_dtype=kept, kv_cache_dtype_skip_layers="sliding_window")
    assert dtypes == [torch.float16 if window else TORCH[kept] for window in windows]
    assert told == f"{kept}, float16 in layers sliding_window"
    numbers = ",".join(str(at) for at, window in enumerate(windows) if window)
    assert ask(gemma, kv_cache_dtype=kept, kv_cache_dtype_skip_layers=numbers)[0] == some
    assert some not in (full, whole) and full != whole
    both = f"{windows.index(False)} sliding_window" if windows.count(False) == 1 else ",".join(map(str, range(99)))
    assert ask(gemma, kv_cache_dtype=kept, kv_cache_dtype_skip_layers=both)[:2] == (full, [torch.float16] * len(dtypes))


def test_an_explicit_dtype_is_that_of_the_skipped(config_folder: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "dtype": "float32"}
    _, dtypes, told = ask(config_folder, **options, kv_cache_dtype_skip_layers=["1"])
    assert dtypes == [torch.int8, torch.float32] and told == "int8, float32 in layers 1"


def test_nothing_quantized_is_nothing_to_skip(config_folder: str) -> None:
    plain = ask(config_folder)
    assert ask(config_folder, kv_cache_dtype_skip_layers="0") == plain
    with tiny.dummy(config_folder, kv_cache_dtype_skip_layers="0") as llm:
        why = {one.name: one.why for one in llm.settings}["kv_cache_dtype_skip_layers"]
    assert why == "without effect: kv_cache_dtype=auto quantizes no layer"


def _spec(architecture: str) -> Any:
    return spec_from_config({"architectures": [architecture], **FAMILIES[architecture].like[0]})


def test_memory_is_planned_for_what_is_stored() -> None:
    spec = _spec("LlamaForCausalLM")
    sizes = [
        bytes_per_token(spec, EngineConfig(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped))
        for dtype, skipped in (("int8", None), ("int8", "0"), ("int8", "0,1"), ("float16", None))
    ]
    assert sizes[0] < sizes[1] <= sizes[2] == sizes[3]


@pytest.mark.parametrize(
    ("architecture", "skipped", "told"),
    [
        (
            "LlamaForCausalLM",
            "0,2",
            "kv_cache_dtype_skip_layers=2 is over the model's 2 layers: name those from 0 to 1",
        ),
        ("LlamaForCausalLM", "sliding_window", "no layer with a sliding window; name layers by number"),
        ("Mamba2ForCausalLM", "0", "layer 0 keeps no keys and values"),
    ],
)
def test_layers_that_are_not_there(architecture: str, skipped: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        keep_layers(_spec(architecture), EngineConfig(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=skipped))


@pytest.mark.parametrize("wrong", ["", ",", "-1", "first", "0,x", "1.5", "٣", "123456", "0," * 2000])
def test_what_is_no_layer(wrong: str) -> None:
    with pytest.raises(InvalidConfig, match="is not valid: give layers by number") as told:
        EngineConfig(kv_cache_dtype_skip_layers=wrong)
    assert len(str(told.value)) < 250


def test_spellings() -> None:
    """A list in Python, several values after the flag: as vLLM takes them."""
    assert parse_skips("0, 12 sliding_window") == (frozenset({0, 12}), True) and parse_skips(None) == (
        frozenset(),
        False,
    )
    made = EngineConfig.from_options(kv_cache_dtype_skip_layers=[0, "1", "sliding_window"])
    assert made.kv_cache_dtype_skip_layers == "0,1,sliding_window"
    assert EngineConfig.from_options(kv_cache_dtype_skip_layers=[]).kv_cache_dtype_skip_layers is None
    given = ["7", "--kv-cache-dtype-skip-layers", "0", "12", "sliding_window", "--seed", "1", "2"]
    assert join_layers(given) == ["7", "--kv-cache-dtype-skip-layers", "0,12,sliding_window", "--seed", "1", "2"]


def test_every_layer_is_verified(config_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-tokens", "1024"]
    skips = ["--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", "1", "--json"]
    assert main(["verify", config_folder, *given, *skips]) == 0
    assert json.loads(capsys.readouterr().out)["right"]


def test_stored_blocks_have_another_name(config_folder: str, tmp_path: Path) -> None:
    """Blocks of the same sizes that hold other layers in full are not read."""
    store = {"kv_offloading_path": str(tmp_path), "kv_cache_dtype": "int8"}
    hits = []
    for skipped in ("0", "0", "1"):
        with tiny.dummy(config_folder, **store, kv_cache_dtype_skip_layers=skipped) as llm:
            llm.generate(PROMPT, PARAMS, use_tqdm=False)
            hits.append(llm.stats()["num_cached_tokens"] > 0)
    assert hits == [False, True, False]
