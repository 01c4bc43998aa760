"""Marked streams: cut anywhere, they give the same events, and what was not marked is not shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
from penstock.server.http.relay import MARK, MOVED
from penstock.server.router.http_client import Address, UpstreamFailed
from penstock.server.router.marks import MarkedStream

UNITS = [
    (b"data: one\n\n", [[0, 0, [1, 2]]]),
    (b"", [[0, 1, [9]]]),
    (b"data: two\n\ndata: 3\n\n", [[0, 0, [3], "stop"]]),
]
STREAM = b"".join(events + MARK + msgspec.json.encode(mark) + b"\n" for events, mark in UNITS)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
@settings(deadline=None)
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    stream, shown, at = MarkedStream(), b"", 0
    for cut in [*sorted(cuts), len(STREAM)]:
        shown += stream.push(STREAM[at:cut])
        at = cut
    assert shown == b"".join(events for events, _ in UNITS)
    shown += stream.push(b"data: [DONE]\n\n") + stream.finish()
    assert shown.endswith(b"data: [DONE]\n\n")
    parts = msgspec.json.decode(stream.resume("k"))["parts"]
    assert [part[:4] for part in parts] == [[0, 0, [1, 2, 3], "stop"], [0, 1, [9], None]]


@given(st.integers(0, len(STREAM)))
@settings(deadline=None)
def test_lost_server_leaves_only_what_was_marked(cut: int) -> None:
    stream = MarkedStream()
    shown = stream.push(STREAM[:cut])
    num_marked = STREAM[:cut].count(b"\n") and sum(
        cut >= len(b"".join(events + MARK + msgspec.json.encode(mark) + b"\n" for events, mark in UNITS[: number + 1]))
        for number in range(len(UNITS))
    )
    assert shown == b"".join(events for events, _ in UNITS[:num_marked])
    assert bool(stream.resume("k")) == bool(num_marked)
    stream.restart()
    assert stream.finish() == b""


def test_stopping_server_is_left() -> None:
    stream = MarkedStream()
    assert stream.push(b"data: half\n\n" + MOVED + b"more") == b"" and stream.has_moved


@pytest.mark.parametrize("mark", [b"{", b"[[]]", b'[["a"]]', b"[[0,0,[1.5]]]", b"1", b'{"a":1}', b"[[0,0,[1],2]]"])
def test_wrong_marks_are_a_failure_of_the_server(mark: bytes) -> None:
    with pytest.raises(UpstreamFailed, match="mark"):
        MarkedStream().push(MARK + mark + b"\n")


def test_unmarked_flood_is_bounded() -> None:
    stream = MarkedStream()
    with pytest.raises(UpstreamFailed, match="without a mark"):
        for _ in range(1000):
            stream.push(b"x" * 65536)


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://a:b", "http://u:p@host", "http://h?x=1", "http://h:99999"]
)
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="HOST:PORT"):
        Address.parse(url)


def test_urls_may_have_a_path() -> None:
    found: Any = Address.parse("https://host/base/v1/")
    assert (found.host, found.port, found.is_tls, found.prefix) == ("host", 443, True, "/base")
