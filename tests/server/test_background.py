"""`background: true`: a response is made though its client leaves, and is there for whoever comes back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.errors import Busy
from penstock.server.http.errors import ApiError
from penstock.server.responses.background import PIECE_BYTES, Background, EventLog, ResponseStore
from tests.server.running import RunningServer

LONG: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 3500, "temperature": 0}


@pytest.fixture
def slow(tiny_model: Path) -> Iterator[RunningServer]:
    """A server whose LONG answers take over a minute on any machine."""
    command = (sys.executable, "-m", "tests.server.serve_faulty")
    with RunningServer(str(tiny_model), command=command, env={"FAULTY_STEP_S": "0.02"}) as running:
        yield running


@pytest.fixture
def client(keeping: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="one", max_retries=0)


def ended(client: openai.OpenAI, id: str) -> Any:
    end = time.monotonic() + 60
    while (response := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return response


def test_polled(client: openai.OpenAI, keeping: RunningServer) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 40, "temperature": 0}
    made = client.responses.create(**asked, background=True)
    assert made.status == "queued" and made.background and made.output == [] and made.usage is None
    assert "Hello" in client.responses.input_items.list(made.id).data[0].to_json()
    stranger = openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="two", max_retries=0)
    for ask in (stranger.responses.retrieve, stranger.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    response = ended(client, made.id)
    waited_for = client.responses.create(**asked)
    assert response.output_text == waited_for.output_text and response.status == waited_for.status
    assert response.usage.output_tokens == waited_for.usage.output_tokens
    assert response.background and not waited_for.background
    following = client.responses.create(model="tiny", input="And?", previous_response_id=made.id, max_output_tokens=1)
    assert following.previous_response_id == made.id
    assert client.responses.cancel(made.id).status == response.status  # nothing is left to cancel
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(waited_for.id)
    with pytest.raises(openai.BadRequestError, match="stream=true"):
        list(client.responses.retrieve(made.id, stream=True))


def test_a_stream_is_taken_up_again(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="tiny", input="Hello", max_output_tokens=200, background=True, stream=True)
    first = []
    for event in stream:
        first.append(event)
        if len(first) == 6:
            break
    stream.close()  # the client leaves
    id = first[0].response.id  # type: ignore[union-attr]
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in first] == list(range(6))
    rest = list(client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number))
    assert [event.sequence_number for event in rest] == list(range(6, 6 + len(rest)))
    last = rest[-1].response  # type: ignore[union-attr]
    assert last.status in ("completed", "incomplete") and last.usage is not None
    text = "".join(event.delta for event in (*first, *rest) if event.type == "response.output_text.delta")
    assert text == last.output_text == client.responses.retrieve(id).output_text
    again = list(client.responses.retrieve(id, stream=True))  # it has ended, and is kept
    assert [event.type for event in again] == [event.type for event in (*first, *rest)]
    assert list(client.responses.retrieve(id, stream=True, starting_after=10**6)) == []


def test_cancelled(slow: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="one", max_retries=0)
    running = client.responses.create(**LONG, background=True)
    followed = client.responses.create(**LONG, background=True, stream=True)
    created = next(iter(followed))
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(model="tiny", input="x", previous_response_id=running.id)
    response = client.responses.cancel(running.id)
    assert response.status == "cancelled" and client.responses.retrieve(running.id).status == "cancelled"
    number = httpx.get(
        f"{slow.url}/v1/responses/{running.id}?stream=true&starting_after=x", headers={"x-api-key": "one"}
    )
    assert number.status_code == 400
    assert client.responses.cancel(created.response.id).status == "cancelled"
    assert "response.completed" not in [event.type for event in followed]  # who follows it sees its end
    deleted = client.responses.create(**LONG, background=True)
    client.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)


def test_not_kept_is_not_made(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(model="tiny", input="x", background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="input is needed"):
        client.responses.create(model="tiny", background=True)


class Answer:
    """As much of an answer as the background needs."""

    def __init__(self, id: str, chunks: list[bytes], gate: asyncio.Event) -> None:
        self.id, self._chunks, self._gate = id, chunks, gate
        self.closed = 0
        self.body = self.generation = self.times = self
        self.stream, self.first_s = True, None

    def close(self) -> None:
        self.closed += 1

    def format(self, status: str, items: list[Any]) -> dict[str, Any]:
        return {"id": self.id, "status": status}

    def encode_queued(self) -> bytes:
        return b"event: queued\n\n"

    def format_partial(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "status": status}

    def encode_failure(self, error: ApiError) -> bytes:
        return f"event: failed\ndata: {error.message}\n\n".encode()

    def format_failure(self, error: ApiError) -> dict[str, Any]:
        return {"id": self.id, "status": "failed"}

    async def events(self) -> Any:
        for chunk in self._chunks:
            await self._gate.wait()
            if not chunk:
                raise Busy("the server is busy", 1)
            yield chunk


def test_bounds_and_ends() -> None:
    async def main() -> None:
        gate, store = asyncio.Event(), ResponseStore(max_bytes=1000)
        background = Background(store, max_running=3, max_log_bytes=150)
        made = {
            id: Answer(id, chunks, gate)
            for id, chunks in (
                ("a", [b"event: one\n\n" * 3]),
                ("b", [b"x" * 90 + b"\n\n", b"y" * 90 + b"\n\n"]),
                ("c", [b""]),
            )
        }
        running = {id: background.start("t", answer, b"[]") for id, answer in made.items()}  # type: ignore[arg-type]
        with pytest.raises(Busy, match="limit is 3"):
            background.start("t", extra := Answer("d", [], gate), b"[]")  # type: ignore[arg-type]
        assert extra.closed  # its tokens are not made for nobody
        background.check_limit("another")
        logs: dict[str, EventLog] = {id: one.log for id, one in running.items() if one.log is not None}
        followers = {id: asyncio.ensure_future(collect(log)) for id, log in logs.items()}
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait([one.task for one in running.values() if one.task is not None])
        assert await followers["a"] == b"event: queued\n\n" + b"event: one\n\n" * 3
        assert b"the server is busy" in await followers["c"]
        with pytest.raises(ApiError, match="not kept"):
            await followers["b"]  # its events had no room; it went on without
        await asyncio.sleep(0)
        assert all(answer.closed for answer in made.values()) and background.find("t", "a") is None
        assert store.find("t", "a").events == (b"event: queued\n\n", *[b"event: one\n\n"] * 3)
        assert b"failed" in store.find("t", "c").response and store.find("t", "b").events == ()
        background.check_limit("t")

        hanging = background.start("t", Answer("e", [b"x"], asyncio.Event()), b"[]")  # type: ignore[arg-type]
        assert background.find("other", "e") is None
        await background.cancel(hanging)
        assert b"cancelled" in store.find("t", "e").response

    async def collect(log: EventLog) -> bytes:
        return b"".join([event async for event in log.follow()])

    asyncio.run(main())


def test_a_log_is_sent_in_pieces() -> None:
    events = [b"x" * 1000 + b"\n\n"] * 200 + [b"y" * (3 * PIECE_BYTES)] + [b"z"]

    async def main() -> None:
        log = EventLog()
        log.events = events
        log.end()
        pieces = [piece async for piece in log.follow(9)]
        assert b"".join(pieces) == b"".join(events[10:])
        assert len(pieces) == 5 and all(len(piece) <= PIECE_BYTES for piece in pieces[:3])

    asyncio.run(main())


def test_one_that_grew_too_large_is_not_told_as_it_began() -> None:
    store = ResponseStore(max_bytes=1000)
    store.put("t", {"id": "a", "status": "queued"}, b"[]")
    store.put("t", {"id": "a", "status": "completed", "output": "x" * 1000}, b"[]")
    with pytest.raises(ApiError, match="not stored"):
        store.find("t", "a")
    store.put("t", {"id": "b"}, b"[]")
    store.put_events("t", "b", [b"x" * 1000])
    assert store.find("t", "b").events == ()
