"""Several ranks with a store: each keeps its own part of a block, and a part that one has lost is computed by all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.runner.store.files import FOLDER
from penstock.runner.store.segment import HEADER
from tests.same_tokens.roads import Answer, answer, tiny_llm, tiny_model, together

STAGES, SHARDS = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
SIZES = [STAGES, SHARDS]
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, ignore_eos=True, logprobs=1)
Make = Callable[..., LLM]


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    common = [rng.randrange(3, 90) for _ in range(48)]
    return [common + [rng.randrange(3, 90) for _ in range(20 + i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("kept"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def cold(model: str) -> list[Answer]:
    with tiny_llm(model, enable_prefix_caching=False) as llm:
        return together(llm, prompts(), [PARAMS] * 6)


@pytest.fixture
def make(model: str, tmp_path: Path) -> Make:
    return lambda **options: tiny_llm(model, **{"kv_offloading_path": str(tmp_path / "kv"), **options})


def list_segments(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv" / FOLDER).iterdir())


def fill(make: Make, cold: list[Answer], **options: Any) -> None:
    with make(**options) as llm:
        assert together(llm, prompts(), [PARAMS] * 6) == cold
        llm.service.engine.save(everything=True)


@pytest.mark.parametrize("sizes", [pytest.param(STAGES, marks=pytest.mark.slow), SHARDS], ids=str)
def test_restored_parts_give_the_bits_of_one_process(
    make: Make, cold: list[Answer], tmp_path: Path, sizes: dict[str, int]
) -> None:
    fill(make, cold, **sizes)
    assert len(list_segments(tmp_path)) == 2, "each rank has written its own"
    with make(**sizes) as llm:
        output = llm.generate([prompts()[2]], PARAMS, use_tqdm=False)[0]
        assert answer(output) == cold[2]
        assert output.num_cached_tokens == (len(prompts()[2]) - 1) // 16 * 16
        assert llm.stats()["num_restored_tokens"] == output.num_cached_tokens
        assert together(llm, prompts(), [PARAMS] * 6) == cold
        assert llm.stats()["num_lost_restores"] == 0
    for other in ({}, *(other for other in SIZES if other != sizes)):
        with make(**other) as llm:
            assert together(llm, prompts(), [PARAMS] * 6) == cold
            assert llm.stats()["num_restored_tokens"] == 0, "another layout has other parts"


def harm(file: Path, how: str) -> None:
    """Harm a segment whose index has been read."""
    data = bytearray(file.read_bytes())
    if how == "flip":
        for place in range(HEADER.size + 7, len(data), 64):
            data[place] ^= 4
    file.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "delete":
        file.unlink()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("how", ["flip", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "delete"))])
def test_a_part_that_one_rank_lost_is_computed_again(
    make: Make, cold: list[Answer], tmp_path: Path, sizes: dict[str, int], how: str
) -> None:
    """Whichever rank it is: the ranks' files are harmed by turns, the whole ones put back in between."""
    fill(make, cold, **sizes)
    whole = {file: file.read_bytes() for file in list_segments(tmp_path)}
    num_lost = []
    for harmed in whole:
        for file in list_segments(tmp_path):
            file.unlink()
        for file, data in whole.items():
            file.write_bytes(data)
        with make(**sizes) as llm:
            harm(harmed, how)
            assert together(llm, prompts(), [PARAMS] * 6) == cold
            num_lost.append(llm.stats()["num_lost_restores"])
    assert min(num_lost) >= (how != "delete") and max(num_lost) > 0, "rank 0 notices a missing file before it plans"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_memory_beside_a_small_cache(make: Make, cold: list[Answer], sizes: dict[str, int]) -> None:
    """Blocks are evicted, saved and loaded while other rows are computed, with plans under way."""
    options: dict[str, Any] = dict(kv_offloading_path=None, kv_offloading_size=0.01, kv_cache_tokens=192)
    with make(**sizes, **options, max_model_len=96) as llm:
        for _ in range(3):
            assert together(llm, prompts(), [PARAMS] * 6) == cold
            assert [answer(llm.generate([one], PARAMS, use_tqdm=False)[0]) for one in prompts()] == cold
        stats = llm.stats()
        assert stats["num_restored_tokens"] > 96 and stats["num_evicted_blocks"] > 10
        assert stats["num_lost_restores"] == 0, "memory is shared out as blocks are"
        assert 0 < stats["num_store_bytes"] < 0.6 * 0.01 * (1 << 30)


def test_all_is_written_when_a_session_is_saved_and_gone_when_the_cache_is_reset(
    make: Make, cold: list[Answer], tmp_path: Path
) -> None:
    with make(**STAGES) as first, make(**STAGES) as second:
        output = first.generate([prompts()[0]], PARAMS, use_tqdm=False)[0]
        assert answer(output) == cold[0]
        saves = first.service.engine.scheduler.cache.saves
        assert saves is not None
        saves.is_urgent = True  # as where a session is saved, or a prompt handed over
        first.service.engine._save_urgent()
        found = second.generate([prompts()[0]], PARAMS, use_tqdm=False)[0]
        assert answer(found) == cold[0] and found.num_cached_tokens == 64, "both ranks find what the others wrote"
        second.reset_prefix_cache()
        assert not list_segments(tmp_path)
        assert second.generate([prompts()[0]], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0
