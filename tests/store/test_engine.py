"""Prefixes restored by an engine: the same answers whatever becomes of the store, and nobody else's blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidConfig
from penstock.runner.store.files import FOLDER
from penstock.text.prompt_encoder import Encoded
from penstock.types import RequestOutput
from tests.same_tokens.roads import Answer, always, answer, tiny_llm, tiny_model, together

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=1, detokenize=False)
Make = Callable[..., LLM]


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    common = [rng.randrange(3, 64) for _ in range(48)]
    return [common + [rng.randrange(3, 64) for _ in range(20 + i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("stored"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def cold(model: str) -> list[Answer]:
    with tiny_llm(model, enable_prefix_caching=False) as llm:
        return together(llm, prompts(), [PARAMS] * 6)


@pytest.fixture
def make(model: str, tmp_path: Path) -> Make:
    def made(**options: Any) -> LLM:
        return tiny_llm(model, **{"kv_offloading_path": str(tmp_path / "kv"), **options})

    return made


@pytest.fixture
def filled(make: Make, cold: list[Answer]) -> Iterator[Make]:
    with make() as llm:
        assert together(llm, prompts(), [PARAMS] * 6) == cold
        assert llm.stats()["num_saved_blocks"] > 10
    yield make


def ask(llm: LLM, tokens: Sequence[int], **changes: Any) -> RequestOutput:
    return llm.generate(list(tokens), PARAMS.clone(**changes), use_tqdm=False)[0]


def test_cached_tokens_count_what_was_restored(filled: Make, cold: list[Answer]) -> None:
    with filled() as llm:
        output = ask(llm, prompts()[2])
        assert answer(output) == cold[2]
        assert output.num_cached_tokens == (len(prompts()[2]) - 1) // 16 * 16
        assert llm.stats()["num_restored_tokens"] == output.num_cached_tokens
        assert llm.stats()["num_lost_restores"] == 0


@pytest.mark.parametrize("road", ["n", "drafts", "evicted", "ram"])
def test_other_roads(filled: Make, cold: list[Answer], road: str) -> None:
    if road == "n":
        with filled() as llm:
            outputs = [ask(llm, one, n=3) for one in prompts()]
            assert [answer(output) for output in outputs] == cold
            assert llm.stats()["num_restored_tokens"] > 48
    elif road == "drafts":
        with filled(speculative_config={"method": "auto"}) as llm:
            assert together(always(llm), prompts(), [PARAMS] * 6) == cold
    elif road == "evicted":
        with filled(kv_cache_tokens=128, max_model_len=96) as llm:
            for _ in range(2):
                assert [answer(ask(llm, one)) for one in prompts()] == cold
            assert llm.stats()["num_restored_tokens"] >= 96 and llm.stats()["num_evicted_blocks"] > 10
    else:
        with filled(kv_offloading_path=None, kv_offloading_size=0.01, kv_cache_tokens=128, max_model_len=96) as llm:
            for _ in range(2):
                assert [answer(ask(llm, one)) for one in prompts()] == cold
            assert llm.stats()["num_restored_tokens"] > 48


@pytest.mark.parametrize("harm", ["flip", "cut", "delete", "all"])
def test_a_harmed_store_changes_no_answer(filled: Make, cold: list[Answer], tmp_path: Path, harm: str) -> None:
    """The files are harmed after the engine has read their index, under load."""
    with filled() as llm:
        rng = random.Random(harm)
        for file in (tmp_path / "kv" / FOLDER).iterdir():
            data = bytearray(file.read_bytes())
            if harm in ("flip", "all"):
                for place in range(rng.randrange(64), len(data), 64 if harm == "all" else 9000):
                    data[place] ^= 1 << rng.randrange(8)
            file.write_bytes(data[: len(data) // 2] if harm == "cut" else data)
            if harm == "delete":
                file.unlink()
        assert together(llm, prompts(), [PARAMS] * 6) == cold
        lost = llm.stats()["num_lost_restores"]
        assert lost == 0 if harm == "delete" else lost > 0, "a missing file is noticed before anything is planned"


def test_damage_is_mended_by_the_next_request(filled: Make, cold: list[Answer], tmp_path: Path) -> None:
    """All blocks that a plan should load are looked at, so that those which are lost are saved again."""
    with filled() as llm:
        for file in (tmp_path / "kv" / FOLDER).iterdir():
            file.write_bytes(
                bytes(byte ^ 1 if place % 64 == 63 else byte for place, byte in enumerate(file.read_bytes()))
            )
        assert answer(ask(llm, prompts()[0])) == cold[0]
        assert llm.stats()["num_lost_restores"] == 1
    with filled() as llm:
        assert answer(ask(llm, prompts()[0])) == cold[0]
        assert llm.stats()["num_restored_tokens"] >= 48 and llm.stats()["num_lost_restores"] == 0


def test_nothing_is_shared_between_models_or_settings(filled: Make, cold: list[Answer], tmp_path: Path) -> None:
    for change in ({"seed": 1}, {"block_size": 32}, {"kv_cache_dtype": "float32"}):
        with filled(**change) as llm:
            other = together(llm, prompts(), [PARAMS] * 6)
            assert llm.stats()["num_restored_tokens"] == 0, change
            assert (other == cold) == ("block_size" in change)


def test_nothing_is_shared_between_salts(filled: Make) -> None:
    def add(llm: LLM, salt: str) -> int:
        collector = llm.service.submit(Encoded(prompts()[0], salt=salt), PARAMS)
        while llm.service.engine.has_work:
            llm.service.step()
        return collector.output().num_cached_tokens

    with filled() as llm:
        assert add(llm, "tenant") == 0
        llm.service.engine.save(everything=True)
    with filled() as llm:
        assert add(llm, "other") == 0 and add(llm, "tenant") > 48 and add(llm, "") > 48


def test_reset_forgets_the_files_too(filled: Make, cold: list[Answer]) -> None:
    with filled() as llm:
        llm.reset_prefix_cache()
        assert answer(ask(llm, prompts()[0])) == cold[0]
        assert llm.stats()["num_restored_tokens"] == 0
        llm.reset_prefix_cache()
    with filled() as llm:
        assert ask(llm, prompts()[0]).num_cached_tokens == 0


def test_bad_options_are_refused(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="kv_offloading_path.*name a folder"):
        make(kv_offloading_path=str(tmp_path / "file"))
    with pytest.raises(InvalidConfig, match="kv_offloading_size=60000 is over the .* GiB that are free: lower it"):
        make(kv_offloading_size=60000.0)
    with pytest.raises(InvalidConfig, match="kv_offloading_size=-1.* out of range"):
        make(kv_offloading_size=-1.0)
    with make(enable_prefix_caching=False) as llm:
        assert "kv_offloading_path" in caplog.text and "enable_prefix_caching is off" in caplog.text
        assert ask(llm, prompts()[0]).outputs
