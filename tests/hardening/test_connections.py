"""Connections that send without end, too slowly, or never read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvloop

from penstock.server.connections import connection, http_server, request_parser
from penstock.server.connections.request_parser import MAX_HEADERS, Limits
from penstock.server.connections.slots import ConnectionSlots, peer_of
from tests.hardening.counted import CountedServer
from tests.hardening.fronted import CHUNK, FrontedServer, everything

LINE = b"POST /any HTTP/1.1\r\nHost: localhost\r\n"
CLOSING = LINE + b"Connection: close\r\n"
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(asyncio.new_event_loop, id="asyncio", marks=pytest.mark.slow),
        pytest.param(uvloop.new_event_loop, id="uvloop"),
    ],
)
def running(request: pytest.FixtureRequest) -> Iterator[FrontedServer]:
    with FrontedServer(request.param) as one:
        yield one


@pytest.fixture
def fronted(running: FrontedServer) -> Iterator[FrontedServer]:
    """The server, with nothing left of the test before."""
    app, slots, keep_alive = running.app, running.front.server_state.slots, running.front.config.timeout_keep_alive
    app.go.clear()
    app.num_chunks = 0
    yield running
    app.go.set()
    running.front.server_state.slots, running.front.config.timeout_keep_alive = slots, keep_alive
    wait_until(lambda: app.num_running == 0)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def content(answer: bytes) -> Any:
    """Of a chunked answer."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return json.loads(b"".join(parts))


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def flood(server: FrontedServer, begin: bytes, part: bytes, num_bytes: int = 64 << 20) -> tuple[int, bytes]:
    """Send `part` over and over; how many bytes of it went out, and the answer."""
    sent = 0
    with server.connect() as line:
        line.sendall(begin)
        try:
            while sent < num_bytes:
                line.sendall(part)
                sent += len(part)
        except OSError:
            pass
        return sent, everything(line)


@pytest.mark.parametrize(
    "begin, part, refused",
    [
        (LINE + b"X: ", b"a" * 65536, 431),
        (LINE, b"X: a\r\n" * 8192, 431),
        (LINE + b"X", b"x" * 65536, 431),
        (b"GET /", b"a" * 65536, 431),
        (b"\r\n", b"\r\n" * 32768, 431),
        (b"GET", b" " * 65536, 431),
        (CHUNKED + b"\r\n3;", b"a" * 65536, 400),
        (CHUNKED + b"\r\n0\r\nX: ", b"a" * 65536, 400),
        (CHUNKED + b"\r\n0\r\n", b"X: a\r\n" * 8192, 431),
        (CLOSING + b"Content-Length: 99999999\r\n\r\n", b"a" * 65536, 413),
    ],
    ids=["value", "headers", "name", "target", "blank lines", "blanks", "extension", "trailer", "trailers", "body"],
)
def test_endless_heads_are_refused(fronted: FrontedServer, begin: bytes, part: bytes, refused: int) -> None:
    _, answer = flood(fronted, begin, part, 8 << 20)
    assert status(answer) == refused and b"connection: close" in answer.lower()
    assert status(fronted.ask(CLOSING + b"\r\n")) == 200
    wait_until(lambda: fronted.app.num_running == 0)


def test_who_sends_for_ever_is_cut_off(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_parser, "MAX_DISCARDED", 4 << 20)
    for begin in (LINE + b"X: ", CLOSING + b"Content-Length: 99999999999\r\n\r\n"):
        assert flood(fronted, begin, b"a" * 65536)[0] < 64 << 20


def test_headers_up_to_the_limit_are_taken(fronted: FrontedServer) -> None:
    few = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS - 2))
    assert len(content(fronted.ask(CLOSING + few + b"\r\n"))["headers"]) == MAX_HEADERS
    assert status(fronted.ask(CLOSING + few + b"One: more\r\n\r\n")) == 431
    large = b"X: " + b"a" * 65000 + b"\r\n\r\n"
    assert status(fronted.ask(CLOSING + large)) == 200
    with fronted.connect() as line:  # byte by byte it is the same
        line.sendall(b"\r\n")
        for at in range(0, len(CLOSING + large), 5000):
            line.sendall((CLOSING + large)[at : at + 5000])
            time.sleep(0.002)
        assert status(everything(line)) == 200


def test_trailers_are_no_headers(fronted: FrontedServer) -> None:
    sent = CHUNKED + b"Connection: close\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nHost: evil\r\n\r\n"
    said = content(fronted.ask(sent))
    assert said["bytes"] == 3 and [name for name, _ in said["headers"]] == ["host", "transfer-encoding", "connection"]


def test_many_small_chunks_are_taken(fronted: FrontedServer) -> None:
    sent = CHUNKED + b"Connection: close\r\n\r\n" + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n"
    assert content(fronted.ask(sent))["bytes"] == 100_000


def test_the_target_may_name_a_host(fronted: FrontedServer) -> None:
    for target, path, host in (
        (b"http://evil.example:80/a?b", "/a", "evil.example:80"),
        (b"HTTP://[::1]:90", "/", "[::1]:90"),
        (b"/a", "/a", ""),
    ):
        said = content(fronted.ask(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
        assert (said["path"], said["authority"]) == (path, host)


def test_a_thousand_requests_at_once(fronted: FrontedServer) -> None:
    answer = fronted.ask((LINE + b"\r\n") * 1000)
    assert answer.count(b"HTTP/1.1 200") == request_parser.MAX_PIPELINED + 1


def test_nonsense_does_not_cut_the_answer_before_it(fronted: FrontedServer) -> None:
    answer = fronted.ask(LINE + b"\r\n" + b"\0" * 1000)
    assert answer.count(b"HTTP/1.1") == 1 and content(answer)["path"] == "/any"
    assert status(fronted.ask(b"\0" * 1000)) == 400


@pytest.mark.parametrize("length", [b"9" * 19, b"0" * 9 + b"9" * 9, b"9" * 5000, b"-1", b"+1", b"1_0"])
def test_lengths_beyond_reason(fronted: FrontedServer, length: bytes) -> None:
    expect = LINE + b"Expect: 100-continue\r\nContent-Length: " + length + b"\r\n\r\n"
    answer = fronted.ask(expect)  # at once, though no body has come
    assert status(answer) in (400, 413)


def test_a_length_of_many_digits_costs_nothing() -> None:
    asked = {"type": "http", "path": "/v1/completions", "headers": [(b"content-length", b"9" * 60_000)]}

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    refused = Limits(nothing, 1000)._find_error(asked)
    assert refused is not None and refused.status == 413


# slow ones


@pytest.mark.parametrize(
    "sent, answered", [(b"", 0), (b"P", 408), (LINE + b"X: a\r\n", 408), (b"\r\n", 408), (LINE + b"\r\n" + LINE, 408)]
)
def test_a_head_has_its_time(
    fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch, sent: bytes, answered: int
) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.2)
    with fronted.connect() as line:
        line.sendall(sent)
        assert status(b"HTTP" + everything(line).rpartition(b"HTTP")[2] if answered else everything(line)) == answered
    wait_until(lambda: len(fronted.front.server_state.slots) == 0)


def test_a_trickle_does_not_keep_a_connection(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.5)
    monkeypatch.setattr(connection, "BODY_S", 0.5)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    drops = {
        LINE + b"X: ": b"1",
        LINE + b"Content-Length: 1000\r\n\r\n": b"1",
        CHUNKED + b"\r\n": b"1",
        b"\r\n": b"\r\n",
    }
    lines = {fronted.connect(): begin for begin in drops}
    for line, begin in lines.items():
        line.sendall(begin)
    open_lines = dict(lines)
    end = time.monotonic() + 20
    while open_lines and time.monotonic() < end:
        for line, begin in list(open_lines.items()):
            try:
                line.sendall(drops[begin])
            except OSError:
                del open_lines[line]
        time.sleep(0.02)
    assert not open_lines
    wait_until(lambda: len(fronted.front.server_state.slots) == 0 and fronted.app.num_running == 0)
    for line in lines:
        line.close()


def test_a_body_that_comes_steadily_has_more_time(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.5)
    with fronted.connect() as line:
        line.sendall(CLOSING + b"Content-Length: 40000\r\n\r\n")
        for _ in range(40):
            line.sendall(b"a" * 1000)
            time.sleep(0.04)
        assert content(everything(line))["bytes"] == 40_000


def test_idle_connections_are_closed(fronted: FrontedServer) -> None:
    assert fronted.front.config.timeout_keep_alive == connection.KEEP_ALIVE_S
    fronted.front.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
    with fronted.connect() as line:
        line.sendall(LINE + b"\r\n")
        assert status(everything(line)) == 200  # and then the end


def test_an_answer_before_the_body_is_seen(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    with fronted.connect() as line:
        line.sendall(CLOSING + b"Content-Length: 9999999\r\n\r\n" + b"a" * 5_000_000)
        assert status(everything(line)) == 413
    wait_until(lambda: len(fronted.front.server_state.slots) == 0)


# readers


def test_clients_that_never_read_are_dropped(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.3)
    with fronted.connect(receive_bytes=4096) as line:
        line.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: fronted.app.num_chunks > 0 and fronted.app.num_running == 0)
        assert fronted.app.num_chunks * len(CHUNK) < 4 << 20
    wait_until(lambda: len(fronted.front.server_state.slots) == 0)


def test_slow_readers_are_not(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 2.0)
    with fronted.connect(receive_bytes=4096) as line:
        line.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(25):
            assert line.recv(1 << 16)
            time.sleep(0.1)
            assert fronted.app.num_running == 1


# clients that have ended their side


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n", b"Connection: keep-alive\r\n"])
def test_half_closed_sockets_get_their_answer(fronted: FrontedServer, ending: bytes) -> None:
    with fronted.connect() as line:
        line.sendall(SLOW[:-2] + ending + b"\r\n")
        line.shutdown(socket.SHUT_WR)
        time.sleep(1.3)  # more than two looks whether it is still there
        fronted.app.go.set()
        answer = everything(line)
    assert answer.startswith(b"HTTP/1.1 200") and content(answer)["path"] == "/slow"


def test_half_closed_after_a_large_body(fronted: FrontedServer) -> None:
    sent = LINE + b"Content-Length: 1000000\r\n\r\n" + b"a" * 1_000_000
    assert content(fronted.ask(sent, end=True))["bytes"] == 1_000_000
    assert status(fronted.ask(sent[:-1], end=True)) == 400


def test_clients_that_leave_are_noticed(fronted: FrontedServer) -> None:
    for ends_first in (False, True):
        line = fronted.connect()
        line.sendall(SLOW)
        wait_until(lambda: fronted.app.num_running == 1)
        if ends_first:
            line.shutdown(socket.SHUT_WR)
            time.sleep(0.7)
            assert fronted.app.num_running == 1
        line.close()
        wait_until(lambda: fronted.app.num_running == 0)


def test_clients_on_other_machines_are_asked(fronted: FrontedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "read_tcp_table", dict)
    line = fronted.connect()
    line.sendall(SLOW)
    wait_until(lambda: fronted.app.num_running == 1)
    line.close()
    wait_until(lambda: fronted.app.num_running == 0)
    with fronted.connect() as line:
        line.sendall(SLOW)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        fronted.app.go.set()
        assert status(everything(line)) == 200


# how many


def test_silent_connections_make_way(fronted: FrontedServer) -> None:
    fronted.front.server_state.slots = ConnectionSlots(6)
    assert fronted.front.server_state.slots.max_per_peer == 4
    lines = [fronted.connect() for _ in range(20)]
    assert status(fronted.ask(CLOSING + b"\r\n")) == 200
    assert everything(lines[0]) == b""
    busy = [fronted.connect() for _ in range(4)]
    for line in busy:
        line.sendall(SLOW)
    wait_until(lambda: fronted.app.num_running == 4)
    assert status(fronted.ask(b"")) == 503  # all of them wait for answers
    fronted.app.go.set()
    for line in busy:
        line.shutdown(socket.SHUT_WR)
        assert status(everything(line)) == 200
    for line in (*lines, *busy):
        line.close()


def test_peers() -> None:
    assert peer_of("127.0.0.1") == peer_of("::ffff:127.0.0.1") == "127.0.0.1"
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:2") != peer_of("2001:db8:0:1::1")
    assert peer_of(None) == ""


class One:
    def __init__(self, is_waiting: bool = True) -> None:
        self.is_waiting, self.dropped = is_waiting, False

    def drop(self) -> None:
        self.dropped = True


def test_whoever_has_most_makes_way() -> None:
    slots = ConnectionSlots(10, 8)
    many, few = [One() for _ in range(8)], [One() for _ in range(2)]
    assert all(slots.take(one, "a") for one in many) and all(slots.take(one, "b") for one in few)
    new = One()
    assert slots.take(new, "c") and many[0].dropped and not any(one.dropped for one in few) and len(slots) == 10
    slots.leave(many[0], "a")
    assert len(slots) == 10  # it had left already
    busy = ConnectionSlots(2, 2)
    assert busy.take(One(False), "a") and busy.take(One(False), "b") and not busy.take(One(), "c")


def test_floods_do_not_hold_the_loop(counted: CountedServer) -> None:
    """Each in as few packets as possible, so that as much as possible is parsed at once."""
    host, port = counted.url.removeprefix("http://").split(":")
    small = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    many = [
        LINE + b"X: " + b"a" * (8 << 20),
        LINE + b"X: a\r\n" * 200_000,
        small * 30_000,
        b"\r\n" * 1_000_000,
        CHUNKED + b"\r\n" + b"1\r\na\r\n" * 300_000,
        CHUNKED + b"\r\n1;" + b"a=b;" * 500_000,
        CHUNKED + b"\r\n0\r\n" + b"X: a\r\n" * 200_000,
    ]
    httpx.get(counted.url + "/health")
    counted.forget()
    before = counted.rss_bytes()
    for sent in many:
        lines = [socket.create_connection((host, int(port)), timeout=30) for _ in range(4)]
        for line in lines:
            with contextlib.suppress(OSError):
                line.sendall(sent)
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
                everything(line)
            line.close()
    assert httpx.get(counted.url + "/health/ready").status_code == 200
    counted.check_callbacks()
    assert counted.rss_bytes() - before < 64 << 20


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize(
    "framing, body",
    [
        (b"Content-Length: 5\r\n\r\n", b"abcde"),
        (b"\r\n", b""),
        (b"Content-Length: 0\r\n\r\n", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
    ],
    ids=["length", "none", "zero", "chunked"],
)
@pytest.mark.parametrize("upgrade", [H2C, H2C.replace(b"h2c", b"websocket")], ids=["h2c", "websocket"])
def test_an_upgrade_is_passed_over(fronted: FrontedServer, upgrade: bytes, framing: bytes, body: bytes) -> None:
    """The body comes whole, in one packet or byte by byte, and the connection goes on."""
    num_bytes = 5 if body else 0
    last = CLOSING + b"Content-Length: 2\r\n\r\nxy"
    asked = LINE + upgrade + framing + body
    for parts in (
        [asked + asked + last],
        [asked, last],
        [asked[: -len(body) or None], body, last],
        [bytes([one]) for one in asked] + [last],
    ):
        with fronted.connect() as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for part in parts:
                line.sendall(part)
                time.sleep(0.001)
            answer = everything(line)
        said = [content(b"HTTP" + one) for one in answer.split(b"HTTP/1.1 200")[1:]]
        assert [one["bytes"] for one in said] == [num_bytes] * (len(said) - 1) + [2], answer
        assert len(said) == (3 if len(parts) == 1 else 2) and ["upgrade", "h2c"] not in said[-1]["headers"]


def test_an_upgrade_with_a_large_body(fronted: FrontedServer) -> None:
    body = b"a" * 300_000
    with_body = LINE + H2C.replace(b"Upgrade,", b"close, Upgrade,") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert content(fronted.ask(with_body))["bytes"] == len(body)
    both = LINE + H2C + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert status(fronted.ask(both)) == 400
    assert fronted.ask((LINE + H2C + b"\r\n") * 1000).count(b"HTTP/1.1 200") <= request_parser.MAX_PIPELINED + 1


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
def test_old_clients_get_no_chunks(fronted: FrontedServer, version: bytes) -> None:
    for more in (b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"):
        head, _, body = fronted.ask(
            b"POST /any HTTP/" + version + b"\r\n" + more + b"Content-Length: 2\r\n\r\nab"
        ).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and json.loads(body)["bytes"] == 2
        assert b"connection: close" in head.lower() and b"transfer-encoding" not in head.lower()


@pytest.mark.parametrize(
    "given",
    [
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: gzip",
    ],
)
def test_other_transfer_codings_are_refused(fronted: FrontedServer, given: bytes) -> None:
    answer = fronted.ask(LINE + given + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n", end=True)
    assert status(answer) in (400, 501) and answer.count(b"HTTP/1.1") == 1
    assert b"gzip, chunked" not in given or b"Transfer-Encoding" in answer
    assert content(fronted.ask(CLOSING + b"Transfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"))["bytes"] == 3
