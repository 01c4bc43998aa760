"""Adapters in Python: read once, freed when asked, refused where they are off, on every interface."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from penstock.config import EngineConfig, Facts, GpuFacts, resolve
from penstock.errors import InvalidConfig, InvalidRequest, PenstockError
from tests.lora.conftest import Lab
from tests.lora.test_same_tokens import make

PROMPT = {"prompt_token_ids": list(range(3, 40))}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def options(lab: Lab) -> dict[str, Any]:
    return dict(
        model=lab.base, enable_lora=True, max_lora_rank=64, device="cpu", max_model_len=128, skip_tokenizer_init=True
    )


@pytest.fixture(scope="module")
def expected(lab: Lab) -> list[tuple[int, ...]]:
    with make(lab) as llm:
        loras = [None, lab.lora(0), lab.lora(1)]
        outputs = llm.generate([PROMPT] * 3, PARAMS, lora_request=loras, use_tqdm=False)
    found = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(found)) == 3
    return found


def test_llm_engine(lab: Lab, expected: list[tuple[int, ...]]) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(**options(lab)))
    try:
        assert engine.add_lora(lab.lora(0)) and engine.list_loras() == {1}
        for number, lora in enumerate([None, lab.lora(0), lab.lora(1)]):
            engine.add_request(str(number), PROMPT, PARAMS, lora_request=lora)
        with pytest.raises(InvalidRequest, match="in use"):
            engine.remove_lora(2)  # its request waits
        found: dict[str, tuple[int, ...]] = {}
        while engine.has_unfinished_requests():
            found |= {one.request_id: tuple(one.outputs[0].token_ids) for one in engine.step() if one.finished}
        assert [found[str(number)] for number in range(3)] == expected
        assert engine.remove_lora(2) and not engine.remove_lora(2) and engine.list_loras() == {1}
    finally:
        engine.close()


def test_async_engines(lab: Lab, expected: list[tuple[int, ...]]) -> None:
    async def run() -> None:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**options(lab)))
        assert await engine.add_lora(lab.lora(0)) and await engine.list_loras() == {1}

        async def ask(number: int, lora: LoRARequest | None) -> tuple[int, ...]:
            last = None
            async for output in engine.generate(PROMPT, PARAMS, str(number), lora_request=lora):
                last = output
            assert last is not None
            return tuple(last.outputs[0].token_ids)

        loras = [None, lab.lora(0), lab.lora(1)]
        assert await asyncio.gather(*(ask(i, lora) for i, lora in enumerate(loras))) == expected
        assert await engine.remove_lora(1)
        with pytest.raises(InvalidRequest, match="no folder"):
            await ask(3, LoRARequest("none", 9, "/none"))
        engine.shutdown()
        with pytest.raises(PenstockError, match="closed"):
            await engine.remove_lora(2)

    asyncio.run(run())


def test_files_that_change_are_not_mixed(lab: Lab, tmp_path: Path) -> None:
    """An adapter that was paged out and has changed fails its requests alone; removed, it is read anew."""
    folder = tmp_path / "lora"
    folder.mkdir()

    def copy(index: int) -> None:
        for file in lab.folders[index].iterdir():
            (folder / f"{file.name}.new").write_bytes(file.read_bytes())
            (folder / f"{file.name}.new").replace(folder / file.name)

    copy(0)
    mine = LoRARequest("mine", 50, str(folder))
    with make(lab, max_loras=1, max_cpu_loras=1) as llm:

        def ask(*loras: LoRARequest | None) -> list[tuple[str | None, tuple[int, ...]]]:
            outputs = llm.generate([PROMPT] * len(loras), PARAMS, lora_request=list(loras), use_tqdm=False)
            return [(one.outputs[0].finish_reason, tuple(one.outputs[0].token_ids)) for one in outputs]

        first, _, plain = ask(mine, lab.lora(1), None)
        copy(2)
        assert ask(None, mine) == [plain, ("error", ())]
        assert llm.service.loras.remove(mine) and ask(mine)[0] not in (first, plain)
        assert ask(None) == [plain]


def load_and_unload(lab: Lab, count: int) -> tuple[int, int]:
    """Return how much objects and resident bytes grow over loads, uses and unloads."""
    with make(lab, max_loras=2, max_cpu_loras=4) as llm:
        measures = []
        for number in range(2 * count):
            lora = LoRARequest("same", 1 + number, str(lab.folders[number % 5]))
            if number % 50 == 0:
                llm.generate([PROMPT], PARAMS, lora_request=lora, use_tqdm=False)
            else:
                llm.service.loras.add(lora)
            assert llm.service.loras.remove(lora)
            if number in (count - 1, 2 * count - 1):
                llm.reset_prefix_cache()
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                measures.append((len(gc.get_objects()), resident))
        bank = llm.service.engine.executor.loras  # type: ignore[attr-defined]
        assert bank is not None and bank.num_bytes == 0
    (objects, resident), (objects_after, resident_after) = measures
    return objects_after - objects, resident_after - resident


def test_loads_and_unloads_leave_nothing(lab: Lab) -> None:
    objects, _ = load_and_unload(lab, 100)
    assert objects < 60


@pytest.mark.slow
def test_10000_loads_and_unloads_leave_nothing(lab: Lab) -> None:
    objects, resident = load_and_unload(lab, 5000)
    assert objects < 100 and resident < 8 << 20


def test_refused_where_it_is_off(lab: Lab) -> None:
    with make(lab, enable_lora=False) as llm, pytest.raises(InvalidRequest, match="--enable-lora"):
        llm.generate([PROMPT], PARAMS, lora_request=lab.lora(0))
    gpu = GpuFacts("a GPU", 80 << 30, 80 << 30, 1 << 30, 1 << 16, 1000)
    with pytest.raises(InvalidConfig, match="embedding model needs a CPU.*penstock merge"):
        resolve(
            EngineConfig(device="cuda", enable_lora=True), Facts(4096, 1024, 8 << 30, 2, gpu=gpu, whole_prompts=True)
        )
    facts = Facts(4096, 1024, 8 << 30, 2, gpu=replace(gpu, lora_bytes=1 << 20))
    found = [resolve(EngineConfig(device="cuda", enable_lora=one, max_loras=8), facts) for one in (False, True)]
    fewer = found[0].kv_cache_tokens - found[1].kv_cache_tokens
    assert fewer == 8 * 16 << 20 >> 10  # slots of rank 16, counted where the cache is sized
    asked, checked = EngineConfig(enable_lora=True), replace(facts, gpu=replace(gpu, checked=True))
    assert resolve(asked, checked).device == "cuda"
    assert resolve(asked, replace(checked, whole_prompts=True)).device == "cpu"


def test_async_llm_removes(lab: Lab) -> None:
    async def run() -> None:
        with AsyncLLM(**options(lab)) as llm:
            async for _ in llm.generate(PROMPT, PARAMS, lora_request=lab.lora(0)):
                pass
            assert await llm.list_loras() == {1} and await llm.remove_lora(lab.lora(0)) and not await llm.list_loras()

    asyncio.run(run())


def test_fields_of_vllm() -> None:
    """By place or by name, and the older name of the path."""
    one = LoRARequest("mine", 3, "/a")
    assert one == LoRARequest(lora_name="mine", lora_int_id=3, lora_local_path="/a", base_model_name="base")
    assert one.lora_local_path == one.path == "/a" and hash(one) == hash(LoRARequest("mine", 3, lora_path="/a"))
    for said, fields in (
        ("lora_local_path='/b'", dict(lora_path="/a", lora_local_path="/b")),
        ("long_lora_max_len=8192", dict(lora_path="/a", long_lora_max_len=8192)),
        ("lora_path=''", {}),
        ("lora_int_id=0", dict(lora_path="/a", lora_int_id=0)),
    ):
        with pytest.raises(InvalidRequest, match=said):
            LoRARequest(**{"lora_name": "mine", "lora_int_id": 3, **fields})  # type: ignore[arg-type]
