"""Bodies that ask for more work than they are worth: the first error, soon, for a few times their size at most."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, RootModel, ValidationError

from penstock.errors import SHOWN_CHARS, Busy, quote
from penstock.server.app import DELETES, WRITES
from penstock.server.connections import body_memory
from penstock.server.connections.body_memory import SMALL_BYTES, BodyMemory, BodyReservation
from penstock.server.http import unknown_keys
from penstock.server.http.decode import (
    MAX_COMMAS,
    MAX_FREE_DEPTH,
    MAX_FREE_VALUES,
    MAX_OPENED,
    MAX_QUOTES,
    SLICE_BYTES,
    JsonBudget,
    JsonCounts,
    count_tokens,
    decode,
)
from penstock.server.http.errors import MAX_MESSAGE_CHARS, ApiError, make_body_error
from penstock.server.http.unknown_keys import MAX_KEYS, UnknownKeys
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.embeddings import EmbeddingBody
from penstock.server.sglang.routes import EncodeBody
from tests.hardening.counted import CountedServer

MIB = 1 << 20
MAX_BODY_BYTES = 32 * MIB  # --max-body-mb by default
BODIES = {body for _, _, body, _ in (*WRITES, *DELETES) if body is not None and not issubclass(body, RootModel)}
KINDS = sorted(BODIES, key=lambda kind: kind.__name__)
ROUTES = [("POST", path, body) for path, _, body, _ in WRITES if body is not None] + [
    ("DELETE", path, body) for path, _, body, _ in DELETES if body is not None
]
# values of fields that a route may need: each body takes those it knows
VALID: dict[str, Any] = {
    "lora_name": "a",
    "session": "a",
    "lora_path": "/none",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "inputs": "hi",
    "tokens": [5],
    "text_1": "hi",
    "text_2": "ho",
    "query": "hi",
    "documents": ["ho"],
    "max_tokens": 2,
    "input_prefix": "hi",
    "input_suffix": "ho",
    "input_file_id": "file-a",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "filename": "slot.bin",
}


def keys(kind: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def valid(kind: type[BaseModel], model: str = "none") -> dict[str, Any]:
    body = {name: value for name, value in {**VALID, "model": model}.items() if name in keys(kind)}
    for name in ("session", "lora_path"):
        if name in body and not kind.model_fields[name].is_required():
            del body[name]
    if kind is EncodeBody:
        body["text"] = "hi"
    if len(body.keys() & {"messages", "prompt", "input"}) > 1:  # of /tokenize and /v1/responses
        del body["prompt"]
    return body


def many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def with_field(kind: type[BaseModel], name: str, value: bytes, model: str = "none") -> bytes:
    """A valid body of that kind in which one field has that JSON."""
    rest = json.dumps({key: one for key, one in valid(kind, model).items() if key != name}).encode()[1:-1]
    return b"{" + rest + (b", " if rest else b"") + json.dumps(name).encode() + b": " + value + b"}"


# no field takes them; the first ones are just below the limits of what is decoded
ATTACKS: dict[str, bytes] = {
    "nulls": many(b"null", MAX_COMMAS - 20),
    "zeros": many(b"0", MAX_COMMAS - 20),
    "lists": many(b"[]", MAX_OPENED - 10),
    "objects": many(b"{}", MAX_OPENED - 10),
    "texts": many(b'"a"', MAX_QUOTES // 2 - 200),
    "lists of nulls": many(many(b"null", 600), 2000),
    "long texts": many(b'"' + b"a" * MIB + b'"', 16),
    "messages": many(b'{"role": "user", "content": "a"}', MAX_QUOTES // 8 - 100),
    "parts": many(b'{"role": "user", "content": ' + many(b"null", 100) + b"}", 9900),
    "map": b"{" + b",".join(b'"k%d":null' % index for index in range(MAX_QUOTES // 2 - 200)) + b"}",
    "deep": b"[" * 900 + b"]" * 900,
    "deep objects": b'{"a":' * 900 + b"0" + b"}" * 900,
    "digits": b"1" * MIB,
    "text": b'"' + b"a" * (31 * MIB) + b'"',
    "escapes": b'"' + b"\\n" * (15 * MIB) + b'"',
    "wide": b'"' + b"a" * (8 * MIB) + "😀".encode() + b'"',
    "escaped wide": b'"' + b"a" * (9 * MIB) + b'\\ud83d\\ude00"',
    "too many numbers": many(b"0", 4 * MIB),
    "too many objects": many(b"{}", 2 * MIB),
    "too many texts": many(b'""', 2 * MIB),
    "many keys": b"{" + b'"a":0,' * MIB + b'"b":0}',
    "backslashes": many(b'"\\\\"', MIB),
}


# without a server: how much is made of them


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_field_makes_many_errors(kind: type[BaseModel]) -> None:
    values: list[Any] = [
        [None] * 9999,
        [0] * 9999,
        ["a"] * 9999,
        [[]] * 9999,
        [[None] * 200] * 50,
        [{}] * 9999,
        {str(index): None for index in range(9999)},
        {str(index): {} for index in range(9999)},
    ]
    for name in [*keys(kind), "unknown"]:
        for value in values:
            for held in (value, [{"role": "user", "content": value}], {"type": "function", "stop": value}):
                try:
                    kind.model_validate({**valid(kind), name: held})
                except ValidationError as error:
                    assert error.error_count() <= 60, (name, quote(held), error.error_count())
                    assert len(make_body_error(error).message) <= MAX_MESSAGE_CHARS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_unknown_key_of_many_is_named(kind: type[BaseModel]) -> None:
    values = {**valid(kind), **{f"x-{index}": 0 for index in range(50_000)}}
    with pytest.raises(ValidationError) as found:
        kind.model_validate(values, context=JsonBudget(unknown=UnknownKeys(refuses=True)))
    assert [error["loc"] for error in found.value.errors()] == [("x-0",)]
    assert make_body_error(found.value).message == "unknown parameter: 'x-0'"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_few_unknown_keys_of_many_are_looked_at(kind: type[BaseModel], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(unknown_keys, "find_meant", lambda key, known: looked.append(key))
    keys = UnknownKeys()
    values = {**valid(kind), **{f"{'x' * 1000}-{index}": 0 for index in range(50_000)}}
    kind.model_validate(values, context=JsonBudget(unknown=keys))
    assert len(looked) <= MAX_KEYS and len(keys.names) == MAX_KEYS and len(keys.make_warning() or "") < 1000


FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "a message": ({"messages": [VALID["messages"][0]] * 17 + [0] * 9}, "messages.17=0: Input should be an object"),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, 5, 6]}]},
        "messages.0.content.1=5: Input should be an object",
    ),
    "a tool": ({"tools": [{"type": "function", "function": {"name": "f"}}] * 3 + [None] * 9}, "tools.3=None"),
    "a stop": ({"stop": ["a", 5, 6]}, "stop.1=5"),
    "long stops": ({"stop": "a" * 1001}, "it has 1001 characters: the limit is 1000; shorten it"),
    "many messages": ({"messages": VALID["messages"] * 10_001}, "it has 10001 items: the limit is 10000; send fewer"),
    "many bad words": ({"bad_words": ["a"] * 1001}, "the limit is 1000"),
    "a long bad word": ({"bad_words": ["a", "a" * 201]}, "bad_words.1="),
    "many biases": ({"logit_bias": {str(index): 1 for index in range(10_001)}}, "it has 10001 entries: the limit is"),
    "many ids": ({"stop_token_ids": [1] * 1025}, "the limit is 1024"),
    "free values": ({"metadata": {"a": [0] * MAX_FREE_VALUES}}, f"may have {MAX_FREE_VALUES} free-form values"),
    "free depth": ({"chat_template_kwargs": {"a": json.loads("[" * 90 + "]" * 90)}}, f"{MAX_FREE_DEPTH} levels"),
    "free text": ({"metadata": {"a": "a" * (5 * MIB)}}, "characters in all"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_error_is_told(name: str) -> None:
    values, told = FIRST[name]
    raw = bytearray(json.dumps({**valid(ChatBody), **values}).encode())
    with pytest.raises(ApiError) as found:
        decode(raw, ChatBody, MAX_BODY_BYTES)
    assert found.value.status == 400 and told in found.value.message and found.value.param
    assert found.value.param.split(".")[0] in values


def test_what_real_clients_send_is_taken() -> None:
    ids = decode(bytearray(json.dumps({"input": [[1000] * 512] * 2048}).encode()), EmbeddingBody, MAX_BODY_BYTES)
    assert len(ids.input) == 2048
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    f"p{index}": {"type": "string", "description": "what it is " * 50} for index in range(150)
                },
            },
        },
    }
    calls = [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": json.dumps({"text": '{"a": [1, 2], "b": "c"}\n' * 400})},
                }
            ],
        }
    ]
    results = [{"role": "tool", "tool_call_id": "c", "content": 'if x["a"] == "é": {},[]\n' * 400}]
    body = {"messages": [*VALID["messages"], *(calls + results) * 300], "tools": [tool] * 20}
    chat = decode(bytearray(json.dumps(body).encode()), ChatBody, MAX_BODY_BYTES)
    assert len(chat.messages) == 601 and chat.tools is not None and len(chat.tools) == 20


@pytest.mark.parametrize("text", ['{"', "\\", '\\"', '[,"\\\\"', "a" * (SLICE_BYTES - 3) + '\\"{'])
def test_marks_within_texts_do_not_count(text: str) -> None:
    """Whatever stands where a slice ends."""
    for shift in range(4):
        value = {"a" * shift: [text * (SLICE_BYTES // len(text) + 3), 1, 2, "b"], "c": {}}
        raw = json.dumps(value, separators=(",", ":")).encode()
        assert count_tokens(bytearray(raw)) == JsonCounts(num_opened=3, num_quotes=8, num_commas=4), (text[-9:], shift)


@pytest.mark.parametrize(
    "value",
    [
        "a" * 20 * MIB,
        ["a" * 200] * MIB,
        {"a": ["b" * MIB] * 9},
        10**4000,
        [[[[[[]]]]]],
        "\n" * 500,
        b"\0" * 500,
        {str(index): [] for index in range(10**5)},
    ],
)
def test_a_shown_value_is_short(value: object) -> None:
    assert len(quote(value)) <= SHOWN_CHARS and "\n" not in quote(value)


# on a server


def send(server: CountedServer, method: str, path: str, body: bytes) -> httpx.Response:
    return httpx.request(
        method, server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=120
    )


@pytest.fixture(scope="module")
def warm(counted: CountedServer) -> CountedServer:
    """A server every route of which has been used."""
    for method, path, kind in ROUTES:
        send(counted, method, path, with_field(kind, "model", b'"none"'))
    return counted


@pytest.fixture
def watched(warm: CountedServer) -> Iterator[CountedServer]:
    """The server, before and after: no long callback, no more than three of the largest bodies in memory."""
    counted = warm
    counted.forget()
    Path(f"/proc/{counted.process.pid}/clear_refs").write_text("5")  # the peak is what it is now
    before = counted.rss_bytes()
    yield counted
    counted.check_callbacks()
    assert counted.rss_bytes(peak=True) - before < 3 * MAX_BODY_BYTES
    assert httpx.get(f"{counted.url}/health/ready").status_code == 200


def targets(kind: type[BaseModel]) -> list[str]:
    """Of a body's fields, the ones that are attacked: lists, maps and a text among them."""
    attacked = ("messages", "prompt", "input", "inputs", "tokens", "documents", "text_1", "model", "stop")
    return [name for name in keys(kind) if name in attacked][:2]


def attack(server: CountedServer, attacks: list[str], method: str, path: str, kind: type[BaseModel]) -> None:
    fields = [*targets(kind), "unknown"]
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    for index, name in enumerate(attacks):
        field = fields[index % len(fields)]
        answer = send(server, method, path, with_field(kind, field, ATTACKS[name], model))
        if (field, name) == ("tokens", "zeros"):
            assert answer.status_code == 200  # a million ids are a text
            continue
        if field == "unknown" and answer.status_code == 200:
            assert "'unknown'" in answer.headers["warning"] and len(answer.content) < MIB, name
            continue
        assert 400 <= answer.status_code < 500, (name, answer.status_code, answer.text[:300])
        assert len(answer.content) < 2 * MAX_MESSAGE_CHARS and answer.json(), name


IDS = [f"{method}{path}" for method, path, _ in ROUTES]


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=IDS[index], marks=[pytest.mark.slow] * any(kind is one[2] for one in ROUTES[:index]))
        for index, (_, _, kind) in enumerate(ROUTES)
    ],
)
def test_some_attacks(watched: CountedServer, index: int) -> None:
    """Each body has its share of them, on its fields in turn."""
    attack(watched, [*ATTACKS][index % 4 :: 4], *ROUTES[index])


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROUTES)), ids=IDS)
def test_all_attacks(watched: CountedServer, index: int) -> None:
    for shift in range(3):
        attack(watched, [*[*ATTACKS][shift:], *[*ATTACKS][:shift]], *ROUTES[index])


def test_a_404_does_not_repeat_the_name(watched: CountedServer) -> None:
    for method, path, kind in ROUTES:
        if "model" in keys(kind):
            body = with_field(kind, "model", b'"' + b"x" * (8 * MIB) + b'"')
            answer = send(watched, method, path.replace("/slots/{id}", "/slots/1?action=restore"), body)
            assert answer.status_code in (403, 404) and len(answer.content) < 1000, (path, answer.text[:300])
            assert "x" * (SHOWN_CHARS + 1) not in answer.text


def test_many_large_bodies_at_once(watched: CountedServer) -> None:
    """Their bytes are held by a few at a time: the others wait, and small requests do not."""
    kinds = {path: kind for method, path, kind in ROUTES if method == "POST"}
    bodies = [
        (path, with_field(kinds[path], field, value))
        for path, field in (
            ("/v1/chat/completions", "model"),
            ("/v1/completions", "model"),
            ("/v1/messages", "unknown"),
            ("/api/generate", "model"),
            ("/tokenize", "model"),
        )
        for value in (ATTACKS["text"], ATTACKS["nulls"])
    ]

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=watched.url, timeout=120) as client:
            sending = [asyncio.ensure_future(client.post(path, content=body)) for path, body in bodies]
            while not all(one.done() for one in sending):
                assert (await client.get("/health/live")).status_code == 200
                await asyncio.sleep(0.02)
            return [one.result().status_code for one in sending]

    assert set(asyncio.run(run())) <= {400, 404}


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
CALLS = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}] * 4000},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}] * 4000},
]
HEAVY: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [USER, ANSWER] * 4900 + [USER], "truncate_prompt_tokens": 50, "max_tokens": 2},
    ),
    "a long chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (30 * MIB)}]}),
    "messages": ("/v1/messages/count_tokens", {"messages": [USER, ANSWER] * 4900 + [USER]}),
    "calls": ("/v1/messages/count_tokens", {"messages": CALLS}),
    "long parts": (
        "/v1/messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "a" * (15 * MIB)}] * 2}]},
    ),
    "items": ("/v1/responses/input_tokens", {"input": [USER, ANSWER] * 4900 + [USER], "truncation": "auto"}),
    "ollama": ("/api/chat", {"messages": [USER, ANSWER] * 4900 + [USER], "stream": False}),
    "tokenize": ("/tokenize", {"messages": [USER, ANSWER] * 4900 + [USER]}),
    "ids": ("/v1/completions", {"prompt": [5] * 1_200_000, "truncate_prompt_tokens": 50, "max_tokens": 2}),
    "allowed": ("/v1/completions", {"prompt": "a", "max_tokens": 2, "allowed_token_ids": [5] * (1 << 18)}),
    "bad words": ("/v1/completions", {"prompt": "a", "max_tokens": 2, "bad_words": ["a" * 200] * 1000}),
    "schema": ("/v1/completions", {"prompt": "a", "guided_json": {"description": "é" * (4 * MIB - 100)}}),
}


@pytest.mark.parametrize("name", HEAVY)
def test_what_is_large_and_right_holds_up_nobody(watched: CountedServer, name: str) -> None:
    path, body = HEAVY[name]
    model = httpx.get(f"{watched.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(watched.url + path, json={**body, "model": model}, timeout=120)
    assert answer.status_code in (200, 400), answer.text[:300]


def test_a_request_id_adds_no_events(watched: CountedServer) -> None:
    body = {"messages": VALID["messages"], "max_tokens": 2, "stream": True, "request_id": "a\n\ndata: b\r\n\r\nid: c"}
    answer = httpx.post(f"{watched.url}/v1/chat/completions", json=body, timeout=60)
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 1
    assert {json.loads(line.removeprefix("data: "))["id"] for line in lines[:-1]} == {body["request_id"]}
    assert not {"a", "id"} & set(answer.headers)


# the room


def test_the_oldest_body_gets_on_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "MAX_WAIT_S", 0.2)

    async def run() -> None:
        room = BodyMemory(MAX_BODY_BYTES)
        small, oldest, other = BodyReservation(room), BodyReservation(room), BodyReservation(room)
        await small.hold(SMALL_BYTES)
        assert small.num_bytes == 0
        await oldest.hold(SMALL_BYTES + 1)
        await other.hold(3 * MIB)
        await oldest.hold(MAX_BODY_BYTES)  # beyond what is shared
        with pytest.raises(Busy, match="no memory"):
            await other.hold(7 * MIB)
        waiting = asyncio.ensure_future(other.hold(7 * MIB))
        await asyncio.sleep(0)
        await oldest.leave()
        await waiting
        assert other.num_bytes == 14 * MIB
        await other.leave()
        await other.leave()  # once more does nothing

    asyncio.run(run())


def test_a_slow_body_makes_way_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "SLOW_S", 0.05)

    async def run() -> None:
        room = BodyMemory(MAX_BODY_BYTES)
        slow, other = BodyReservation(room), BodyReservation(room)
        await slow.hold(MAX_BODY_BYTES)
        await asyncio.sleep(0.1)
        assert not slow.is_overdue  # nobody waits
        waiting = asyncio.ensure_future(other.hold(9 * MIB))
        await asyncio.sleep(0.1)
        assert slow.is_overdue and not other.is_overdue
        await slow.leave()
        await waiting

    asyncio.run(run())
