"""What came back, read after the measurement: an exchange's bytes become a sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from bench.load.wire import HEAD_END, Exchange

Outcome = Literal["ok", "wrong length", "refused", "failed", "disconnected", "timeout"]
Piece = tuple[float, bytes]
REFUSALS = (429, 503)
MOST_WORDS = 200  # characters of an error


@dataclass(frozen=True)
class Response:
    status: int | None
    headers: dict[str, str]
    pieces: list[Piece]  # of the body, with the time at which each was complete
    whole: bool  # the body came to the end that the head promised

    @classmethod
    def read(cls, exchange: Exchange) -> Response:
        raw = b"".join(data for _, data in exchange.arrivals)
        head, end, _ = raw.partition(HEAD_END)
        words = head.split(b"\r\n")[0].split()
        if not end or len(words) < 2 or not words[1].isdigit():
            return cls(None, {}, [], False)
        pairs = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        body = list(_after(exchange.arrivals, len(head) + len(HEAD_END)))
        if "chunked" in headers.get("transfer-encoding", "").lower():
            pieces, whole = _unchunk(body)
        else:
            pieces, length = body, int(headers.get("content-length", -1))
            whole = length < 0 or sum(len(data) for _, data in body) >= length
        return cls(int(words[1]), headers, pieces, whole)

    def events(self) -> Iterator[Piece]:
        """The values of `data:` lines, each with the time at which its line was complete."""
        rest = b""
        for time_s, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield time_s, line[5:].strip()


def _after(arrivals: list[Piece], skip: int) -> Iterator[Piece]:
    for time_s, data in arrivals:
        if len(data) > skip:
            yield time_s, data[skip:]
        skip = max(0, skip - len(data))


def _unchunk(arrivals: list[Piece]) -> tuple[list[Piece], bool]:
    pieces: list[Piece] = []
    rest = b""
    for time_s, data in arrivals:
        rest += data
        while b"\r\n" in rest:
            line, _, after = rest.partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if size == 0:
                return pieces, True
            if len(after) < size + 2:
                break
            pieces.append((time_s, after[:size]))
            rest = after[size + 2 :]
    return pieces, False


@dataclass
class Sample:
    """One request. Times are in seconds: `begin_s` from the phase's start, the others from the request's."""

    index: int
    begin_s: float
    late_s: float  # sent so much after it was due
    outcome: Outcome
    num_asked: int
    status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    num_output: int | None = None  # from the server's usage, as the next two
    num_prompt: int | None = None
    num_cached: int | None = None
    first_s: float | None = None  # TTFT
    last_s: float | None = None  # E2E
    gaps_s: list[float] = field(default_factory=list)  # between chunks with tokens: ITL

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first."""
        if self.first_s is None or self.last_s is None or not self.num_output or self.num_output < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output - 1)


def read_sample(exchange: Exchange, index: int, start: float, num_asked: int) -> Sample:
    response = Response.read(exchange)
    sample = Sample(
        index, exchange.begin - start, max(0.0, exchange.sent - exchange.begin), "ok", num_asked, response.status
    )
    if exchange.arrivals:
        sample.last_s = exchange.arrivals[-1][0] - exchange.begin
    if exchange.failure == "timeout":
        sample.outcome, sample.error = "timeout", "timeout"
    elif response.status is None:
        sample.outcome, sample.error = "disconnected", exchange.failure or "no response"
    elif response.status != 200:
        sample.outcome = "refused" if response.status in REFUSALS else "failed"
        sample.error = b"".join(piece for _, piece in response.pieces).decode(errors="replace")[:MOST_WORDS]
        sample.retry_after_s = _seconds(response.headers.get("retry-after"))
    else:
        _read_events(response, exchange, sample)
    return sample


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None  # a date: allowed, and of no use here


def _read_events(response: Response, exchange: Exchange, sample: Sample) -> None:
    times: list[float] = []
    done = False
    usage: dict[str, Any] = {}
    for time_s, data in response.events():
        if data == b"[DONE]":
            done = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            sample.outcome, sample.error = "failed", f"no JSON: {data.decode(errors='replace')[:MOST_WORDS]}"
            return
        if "error" in event:
            sample.outcome, sample.error = "failed", json.dumps(event["error"])[:MOST_WORDS]
            return
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            sample.last_s = time_s - exchange.begin
            if _has_tokens(choice):
                times.append(time_s)
    sample.first_s = times[0] - exchange.begin if times else None
    sample.gaps_s = [later - earlier for earlier, later in pairwise(times)]
    sample.num_output, sample.num_prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    sample.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not done:
        sample.outcome, sample.error = "disconnected", exchange.failure or "the stream ended without [DONE]"
    elif sample.num_output != sample.num_asked:
        came = "no usage came" if sample.num_output is None else f"{sample.num_output} tokens came"
        sample.outcome, sample.error = "wrong length", f"{came}, {sample.num_asked} were asked for"


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Return True for a chunk with tokens, of a chat (`delta`) or of a completion: its text is empty while a character
    is not complete."""
    delta = choice.get("delta") or {}
    return "text" in choice or any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )
