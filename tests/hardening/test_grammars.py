"""Grammars that never end, fill memory, or come in bursts: each is answered, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hardening.counted import CountedServer

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOP: dict[str, Any] = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
}
NEVER: dict[str, dict[str, Any]] = {
    "requires itself": LOOP,
    "a million items": {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000},
    "many patterns": {"allOf": [{"type": "string", "pattern": f"a.*{i}.*b"} for i in range(500)]},
    "many lengths": {"allOf": [{"type": "string", "minLength": i * 1000} for i in range(200)]},
    "long string": {"type": "string", "minLength": 200_000},
    "wide objects": {
        "type": "object",
        "properties": {f"k{i}": LOOP["$defs"]["a"] for i in range(50)},
        "required": [f"k{i}" for i in range(50)],
        "$defs": LOOP["$defs"],
    },
}


def body(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "messages": HI,
        "max_tokens": 24,
        "temperature": 0,
        **more,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }


async def ask(url: str, bodies: list[dict[str, Any]], timeout_s: float = 240) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        return list(await asyncio.gather(*(client.post(CHAT, json=one) for one in bodies)))


def lanes(counted: CountedServer) -> list[int]:
    """Sandboxed processes that live: grandchildren of the server, by way of the zygote."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    return [lane for child in children.get(counted.process.pid, ()) for lane in children.get(child, ())]


def test_a_burst_of_equal_schemas_is_answered(counted: CountedServer) -> None:
    schema = {**PERSON, "title": "burst"}
    answers = asyncio.run(ask(counted.url, [body(schema, seed=seed) for seed in range(24)]))
    assert [one.status_code for one in answers] == [200] * 24


def test_a_burst_of_different_schemas_is_answered(counted: CountedServer) -> None:
    schemas = [
        {"type": "object", "properties": {f"key{i}": {"type": "integer"}}, "required": [f"key{i}"]} for i in range(64)
    ]
    counted.forget()
    answers = asyncio.run(ask(counted.url, [body(schema) for schema in schemas]))
    assert [one.status_code for one in answers] == [200] * 64
    counted.check_callbacks()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "requires itself")) for name in sorted(NEVER)]
)
def test_a_schema_that_never_ends_is_answered(counted: CountedServer, name: str) -> None:
    """Refused, or left to its budget; what it took is free again."""
    answer = asyncio.run(ask(counted.url, [body(NEVER[name])]))[0]
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert "structured_outputs" in answer.text or "max_tokens" in answer.text
    assert asyncio.run(ask(counted.url, [body(PERSON)]))[0].status_code == 200


def test_others_do_not_wait_for_slow_grammars(counted: CountedServer) -> None:
    """Twelve that take all their time; a new quick one and a plain request are answered while they run."""

    async def both() -> None:
        slow = [{"allOf": [{"type": "string", "pattern": f"a.*{i}{n}.*b"} for i in range(80)]} for n in range(12)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=counted.url, timeout=240, limits=limits) as one:
            attack = [asyncio.ensure_future(one.post(CHAT, json=body(schema))) for schema in slow]
            await asyncio.sleep(1)
            for n in range(3):
                quick = await one.post(CHAT, json=body({**PERSON, "title": f"quick{n}"}))
                plain = await one.post(CHAT, json={"messages": HI, "max_tokens": 2})
                assert (quick.status_code, plain.status_code) == (200, 200)
            assert not all(task.done() for task in attack)
            for task in attack:
                task.cancel()
            await asyncio.gather(*attack, return_exceptions=True)

    counted.forget()
    asyncio.run(both())
    counted.check_callbacks()


def test_a_client_that_leaves_frees_its_grammar(counted: CountedServer) -> None:
    schemas = [{"allOf": [{"type": "string", "pattern": f"a.*{i}x{n}.*b"} for i in range(300)]} for n in range(4)]
    with pytest.raises(httpx.ReadTimeout):
        asyncio.run(ask(counted.url, [body(schema) for schema in schemas], timeout_s=1.5))
    end = time.monotonic() + 20
    while len(lanes(counted)) > 4 and time.monotonic() < end:  # those for texts stay
        time.sleep(0.1)
    assert len(lanes(counted)) <= 4
    assert asyncio.run(ask(counted.url, [body({**PERSON, "title": "after"})]))[0].status_code == 200


def test_structured_answers_survive_their_engine(tiny_model: Path, tmp_path: Path) -> None:
    with CountedServer(tmp_path / "report", str(tiny_model), "--load-format", "dummy", "--threads", "1") as running:
        bodies = [body({**PERSON, "title": f"t{n}"}, max_tokens=200) for n in range(10)]

        async def killed() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=running.url, timeout=240) as client:
                tasks = [asyncio.ensure_future(client.post(CHAT, json=one)) for one in bodies]
                await asyncio.sleep(0.7)
                os.kill(running.engine_pid(), signal.SIGKILL)
                return list(await asyncio.gather(*tasks))

        answers = asyncio.run(killed())
        assert [one.status_code for one in answers] == [200] * 10, [one.text for one in answers]


def test_a_killed_sandbox_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    with CountedServer(tmp_path / "report", str(tiny_model), "--load-format", "dummy", "--threads", "1") as running:
        assert asyncio.run(ask(running.url, [body(PERSON)]))[0].status_code == 200
        zygotes = [
            int(folder.parent.name)
            for folder in Path("/proc").glob("[0-9]*/cmdline")
            if b"penstock.sandbox.zygote" in folder.read_bytes()
            and int((folder.parent / "stat").read_text().rpartition(")")[2].split()[1]) == running.process.pid
        ]
        assert len(zygotes) == 1
        os.kill(zygotes[0], signal.SIGKILL)
        for n in range(3):
            answer = asyncio.run(ask(running.url, [body({**PERSON, "title": f"again{n}"})]))[0]
            assert answer.status_code == 200, answer.text
