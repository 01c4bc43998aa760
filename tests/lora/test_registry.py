"""The names of a server's adapters: what is told to engines, who is waited for, and what flags may say."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest

from penstock.commands.flags.spelling import spread_modules
from penstock.engine.executor import Answer, DropLora, LoadLora
from penstock.errors import InvalidConfig, InvalidModel, InvalidRequest
from penstock.server.loras.modules import LoraModule, parse_modules
from penstock.server.loras.registry import LoraRegistry


class Engine:
    """Obeys every message, but refuses folders named `bad`."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def ask(self, message: object) -> Answer:
        self.told.append(message)
        await asyncio.sleep(0)
        if isinstance(message, LoadLora) and message.path.endswith("bad"):
            return Answer(error="it is bad")
        return Answer({"fingerprint": "f", "rank": 8, "num_bytes": 100})


def test_an_adapter_in_use_is_freed_when_its_last_request_ends() -> None:
    async def run() -> None:
        engine = Engine()
        registry = LoraRegistry(engine.ask, is_enabled=True)
        await registry.load("a", "/a")
        held = [registry.hold(registry.resolve("a")) for _ in range(2)]
        unloading = asyncio.ensure_future(registry.unload("a"))
        await asyncio.sleep(0.01)
        assert registry.get("a") is None and not unloading.done()
        assert registry.list_messages() == [LoadLora(1, "/a", "f", 8)], "the next engine must know it"
        await registry.load("a", "/b")  # another, under the same name
        assert [use.number for use in registry.resolve("a")] == [2]
        registry.release(held[0])
        await asyncio.sleep(0.01)
        assert not unloading.done() and DropLora(1) not in engine.told
        registry.release(held[1])
        await unloading
        assert engine.told[-1] == DropLora(1) and registry.list_messages() == [LoadLora(2, "/b", "f", 8)]

    asyncio.run(run())


def test_who_leaves_does_not_stop_an_unloading() -> None:
    async def run() -> None:
        engine = Engine()
        registry = LoraRegistry(engine.ask, is_enabled=True)
        await registry.load("a", "/a")
        held = registry.hold(registry.resolve("a"))
        unloading = asyncio.ensure_future(registry.unload("a"))
        await asyncio.sleep(0)
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        registry.release(held)
        await asyncio.sleep(0.01)
        assert engine.told[-1] == DropLora(1)

    asyncio.run(run())


def test_replacing_keeps_the_old_one_for_its_requests() -> None:
    async def run() -> None:
        engine = Engine()
        registry = LoraRegistry(engine.ask, is_enabled=True)
        await registry.load("a", "/a")
        held = registry.hold(registry.resolve("a"))
        with pytest.raises(InvalidRequest, match="load_inplace"):
            await registry.load("a", "/b")
        with pytest.raises(InvalidRequest, match="bad"):
            await registry.load("a", "/bad", in_place=True)
        assert registry.resolve("a")[0].number == 1
        await registry.load("a", "/b", in_place=True)
        assert registry.resolve("a")[0].number == 3
        assert {one.number for one in registry.list_messages() if isinstance(one, LoadLora)} == {1, 3}
        registry.release(held)
        await asyncio.sleep(0.01)
        assert engine.told[-1] == DropLora(1)

    asyncio.run(run())


def test_off_and_bad_modules() -> None:
    async def run() -> None:
        off = LoraRegistry(Engine().ask, is_enabled=False)
        with pytest.raises(InvalidRequest, match="--enable-lora"):
            await off.load("a", "/a")
        with pytest.raises(InvalidRequest, match="--enable-lora"):
            off.resolve(None, [(0, 1.0)])
        registry = LoraRegistry(Engine().ask, is_enabled=True)
        registry.modules = {"x": LoraModule("x", "/bad")}
        assert "x" in registry
        with pytest.raises(InvalidModel, match="--lora-modules x: it is bad"):
            await registry.load_modules()

    asyncio.run(run())


def test_many_loads_and_unloads_leave_nothing() -> None:
    async def run(count: int) -> int:
        engine = Engine()
        registry = LoraRegistry(engine.ask, is_enabled=True)
        for _ in range(count):
            await registry.load("a", "/a")
            await registry.unload("a")
            engine.told.clear()
        gc.collect()
        return len(gc.get_objects())

    asyncio.run(run(10))
    assert abs(asyncio.run(run(300)) - asyncio.run(run(10))) < 100


CD = LoraModule("c", "d")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a=/x/y=z"], [LoraModule("a", "/x/y=z")]),
        (['{"name": "a", "path": "p", "base_model_name": "b"}', "c=d"], [LoraModule("a", "p", "b"), CD]),
        (['[{"name": "a", "path": "p"}]'], [LoraModule("a", "p")]),
    ],
)  # fmt: skip
def test_modules(given: Sequence[str], expected: list[LoraModule]) -> None:
    assert parse_modules(given) == expected


@pytest.mark.parametrize("given", [["a"], ["=x"], ["a="], ["{"], ['{"name": "a"}'], ["a=x", "a=y"], ['{"name": 1}']])
def test_bad_modules(given: Sequence[str]) -> None:
    with pytest.raises(InvalidConfig, match="--lora-modules"):
        parse_modules(given)


def test_several_adapters_may_follow_the_flag() -> None:
    flag = "--lora-modules"
    assert spread_modules(["m", flag, "a=b", "c=d", "--port", "1"]) == ["m", flag, "a=b", flag, "c=d", "--port", "1"]
    assert spread_modules([flag, '{"name": 1}', '{"name": 2}', "model"])[2:4] == [flag, '{"name": 2}']
    plain = ["--api-key", "a=b", "c=d"]
    assert spread_modules(plain) == plain
