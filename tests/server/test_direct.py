"""Text that is written to a connection as it comes: nothing is lost, doubled or overtaken, whoever is slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from penstock.engine.messages import Abort
from penstock.errors import EngineFailed, PenstockError
from penstock.server.common.message_builder import MessageBuilder
from penstock.server.engines import direct
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.direct import DirectWriter, UnwrittenDeltas, join_deltas
from penstock.server.engines.dispatcher import Dispatcher
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.http.context import run_until_disconnect
from penstock.server.openai.completions import CompletionAnswer, CompletionBody
from penstock.text.prompt_encoder import Encoded
from penstock.types import Delta, Logprob, Request, SamplingParams, StreamDelta


class ScriptedBody:
    """A connection that reads or does not."""

    def __init__(self) -> None:
        self.is_ready, self.is_held_up, self.has_begun = True, False, True
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def encode(deltas: list[StreamDelta], join: bool) -> bytes:
    return b"".join(b"%r;" % (list(delta.token_ids),) for delta in (join_deltas(deltas) if join else deltas))


class Stream:
    """A request in a dispatcher without an engine, its writer, and a reader as a response has one."""

    def __init__(self, n: int = 1, encode: direct.Encode = encode, max_tokens: int = 100) -> None:
        sampling = SamplingParams(n=n, max_tokens=max_tokens)
        self.flight = InFlightRequest(
            Request(id="r", tokens=(1, 2), sampling=sampling, max_tokens=max_tokens), None, None
        )
        self.sent: list[Any] = []
        self.dispatcher = Dispatcher(AdmissionQueue(10, 1000))
        self.body = ScriptedBody()
        self.failures: list[PenstockError] = []
        self.recorded = 0
        self.flight.writer = DirectWriter(
            self.body, encode, self._record, self.failures.append, self.dispatcher.unwritten
        )
        self.dispatcher.open(self.dispatcher.replicas.add(self.sent.append), 4)
        self.dispatcher.submit(self.flight)

    def _record(self, deltas: Any, now_s: float) -> None:
        self.recorded += sum(len(delta.token_ids) for delta in deltas)

    def step(self, *tokens: int, **more: Any) -> None:
        """Handle one report with a delta per token."""
        self.dispatcher.handle_deltas([Delta("r", 0, (token,), **more) for token in tokens])
        self.dispatcher.unwritten.flush()

    async def read(self, hold: asyncio.Event | None = None) -> None:
        """Send what `items` yields, as a response's task does; `hold` is what a slow client makes it wait for."""
        async for batch in self.flight.items():
            if hold is not None:
                await hold.wait()
            self.body.write(encode(batch, False))


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def test_tokens_are_written_in_their_step_and_kept() -> None:
    async def work() -> None:
        stream = Stream()
        reader = asyncio.ensure_future(stream.read())
        stream.step(5)  # the first goes by the task: the response has not begun
        assert stream.body.written == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stream.body.written == [b"[5];"]
        stream.step(6)
        stream.step(7, 8)
        assert stream.body.written == [b"[5];", b"[6];", b"[7];[8];"] and stream.recorded == 3
        assert stream.flight.outputs == {0: [5, 6, 7, 8]}  # what another engine would go on with
        stream.step(9, finish_reason="length")
        await reader
        assert stream.body.written[-1] == b"[9];" and not stream.dispatcher.flights

    run(work)


def test_nothing_is_overtaken_while_a_client_does_not_read() -> None:
    async def work() -> None:
        stream, hold = Stream(), asyncio.Event()
        reader = asyncio.ensure_future(stream.read(hold))
        stream.step(1)
        hold.set()
        await asyncio.sleep(0.01)
        stream.body.is_ready = False
        hold.clear()
        stream.step(2)  # not taken: it wakes the task, which waits for the client
        stream.body.is_ready = True
        for token in (3, 4):
            await asyncio.sleep(0)
            stream.step(token)  # ready again, but 2 is not sent yet
        assert b"".join(stream.body.written) == b"[1];"
        hold.set()
        await asyncio.sleep(0.01)
        stream.step(5)
        stream.step(6, finish_reason="length")
        await reader
        assert b"".join(stream.body.written) == b"[1];[2];[3];[4];[5];[6];"

    run(work)


def test_the_end_is_not_sent_before_text_of_the_same_turn() -> None:
    """Even if the task runs before the turn ends: a large report is decoded in a thread meanwhile."""

    async def work() -> None:
        stream = Stream()
        reader = asyncio.ensure_future(stream.read())
        stream.step(1)
        await asyncio.sleep(0.01)
        stream.dispatcher.handle_deltas([Delta("r", 0, (2,))])
        stream.dispatcher.handle_deltas([Delta("r", 0, (3,), finish_reason="length")])
        await reader
        stream.dispatcher.unwritten.flush()
        assert b"".join(stream.body.written) == b"[1];[2];[3];"

    run(work)


def test_streams_are_joined_only_where_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        stream = Stream()
        reader = asyncio.ensure_future(stream.read())
        stream.step(0)
        await asyncio.sleep(0.01)
        stream.step(1, 2, 3)
        stream.step(4, 5, 6, 7)
        assert stream.body.written[1:] == [b"[1];[2];[3];", b"[4, 5, 6, 7];"] and stream.recorded == 7
        stream.step(8, finish_reason="length")
        await reader

    monkeypatch.setattr(direct, "MAX_EVENTS", 3)
    run(work)


def test_an_event_that_cannot_be_encoded_fails_its_own_request() -> None:
    def fail(deltas: list[StreamDelta], join: bool) -> bytes:
        raise ValueError("no")

    async def work() -> None:
        stream = Stream(encode=fail)
        reader = asyncio.ensure_future(stream.read())
        stream.step(1)
        await asyncio.sleep(0.01)
        stream.step(2)
        assert len(stream.failures) == 1 and "ValueError" in str(stream.failures[0])
        reader.cancel()

    run(work)


def test_a_token_that_cannot_be_decoded_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sibling: int, token: int) -> None:
        raise ValueError("no such token")

    async def work() -> None:
        stream = Stream()
        reader = asyncio.ensure_future(stream.read())
        stream.step(1)
        await asyncio.sleep(0.01)
        monkeypatch.setattr(stream.flight.collector, "add_token", fail)
        stream.step(2)
        with pytest.raises(EngineFailed, match="cannot detokenize"):
            await reader
        assert isinstance(stream.sent[-1], Abort) and not stream.dispatcher.flights

    run(work)


def test_joined_deltas_have_all_texts_tokens_and_logprobs() -> None:
    deltas = [
        StreamDelta("r", at % 2, f"t{at}", (at,), ({at: Logprob(-float(at))},), num_prompt_tokens=3) for at in range(5)
    ]
    first, second = join_deltas(deltas)
    assert (first.index, first.text, first.token_ids) == (0, "t0t2t4", (0, 2, 4))
    assert (second.index, second.text, second.token_ids) == (1, "t1t3", (1, 3))
    assert [next(iter(one.values())).logprob for one in first.logprobs] == [0.0, -2.0, -4.0]
    assert first.num_prompt_tokens == 3 and first.finish_reason is None


class NoGeneration:
    """What an answer asks of its generation."""

    class model:
        name, fingerprint, tokenizer = "m", "fp", None

    relaxed: dict[str, list[str]] = {}
    ledger: dict[str, Any] = {}
    flights: list[Any] = []


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"return_token_ids": True}])
def test_a_joined_completion_has_what_the_events_apart_have(more: dict[str, Any]) -> None:
    def read(join: bool) -> list[dict[str, Any]]:
        body = CompletionBody(prompt=[1], stream=True, **more)
        answer = CompletionAnswer(body, [Encoded([1])], NoGeneration())  # type: ignore[arg-type]
        answer._begun[0, 0] = 0
        deltas = [StreamDelta("r", 0, f" t{at}", (at,), ({at: Logprob(-1.0, 1)},)) for at in range(4)]
        data = answer._encode_directly(deltas, join)
        return [json.loads(line[6:])["choices"][0] for line in data.decode().split("\n\n") if line]

    apart, (joined,) = read(False), read(True)
    assert len(apart) == 4 and joined["text"] == "".join(one["text"] for one in apart) == " t0 t1 t2 t3"
    assert joined["finish_reason"] is None and joined.keys() == apart[0].keys()
    if "return_token_ids" in more:
        assert joined["token_ids"] == [0, 1, 2, 3]
    if "logprobs" in more:
        assert joined["logprobs"]["tokens"] == [one["logprobs"]["tokens"][0] for one in apart]
        assert joined["logprobs"]["token_logprobs"] == [-1.0] * 4


def test_content_added_directly_is_part_of_the_message() -> None:
    class Plain:
        max_calls = None

        def new_splitter(self) -> None: ...

        def new_parser(self) -> None: ...

    builder = MessageBuilder(Plain())  # type: ignore[arg-type]
    assert builder.is_plain
    builder.add_text(StreamDelta("r", 0, "Hel", (1,)))
    assert builder.push(StreamDelta("r", 0, "lo", (2,))) == [{"content": "lo"}]
    assert builder.content == "Hello" and builder.token_ids == [1, 2]


def test_work_ends_with_its_client_and_with_its_caller() -> None:
    async def work() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        assert await run_until_disconnect(receive, asyncio.sleep(0, "made")) == "made"
        waiting = asyncio.ensure_future(run_until_disconnect(receive, asyncio.sleep(60)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        left.set()
        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(receive, asyncio.sleep(60))
        await asyncio.sleep(0)  # this task itself is not cancelled

    run(work)


def test_a_flush_without_deltas_writes_nothing() -> None:
    unwritten = UnwrittenDeltas()
    unwritten.flush()
    assert unwritten.num_deltas == 0
