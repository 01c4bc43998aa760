"""Connections between ranks: who does not know the secret gets nothing, and what ranks compare is compared."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import InvalidConfig
from penstock.runner.ranks import link as links
from penstock.runner.ranks.link import Credentials, LinkClosed, Listener, RankLink, WrongSecret, connect, read_secret
from penstock.runner.ranks.messages import Identity, require_equal

SECRET = Credentials(b"s" * 32)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, SECRET)
    yield listener
    listener.close()


class Accepted(threading.Thread):
    """Accepts one connection aside."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(daemon=True)
        self.listener, self.link = listener, None
        self.start()

    link: RankLink | None

    def run(self) -> None:
        self.link = self.listener.accept(5.0)


def test_frames_of_all_sizes(listener: Listener) -> None:
    accepted = Accepted(listener)
    ours = connect(("127.0.0.1", listener.port), SECRET)
    accepted.join()
    theirs = accepted.link
    assert theirs is not None
    for size in (0, 1, 1 << 16, 3 << 20):
        data = secrets.token_bytes(size)
        sender = threading.Thread(target=ours.send, args=(data[: size // 2], data[size // 2 :]))
        sender.start()
        assert theirs.receive(5.0) == data
        sender.join()
    with pytest.raises(LinkClosed, match="in time"):
        theirs.receive(0.05)
    ours.close()
    with pytest.raises(LinkClosed, match="ended"):
        theirs.receive(5.0)
    theirs.close()


def test_wrong_secret_is_refused_on_both_sides(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    accepted = Accepted(listener)
    with pytest.raises(WrongSecret, match=r"127.0.0.1:\d+ has another secret: .*--distributed-secret-file"):
        connect(("127.0.0.1", listener.port), Credentials(b"t" * 32))
    accepted.join()
    assert accepted.link is None
    assert "has another secret" in caplog.text


def test_listener_must_prove_the_secret_too() -> None:
    """Who answers at the address of rank 0 without the secret gets no rank."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(links.GREETING + secrets.token_bytes(links.NONCE_BYTES))
                links._read(connection, len(links.GREETING) + links.NONCE_BYTES + links.MAC_BYTES)
                connection.sendall(links.ACCEPTED + secrets.token_bytes(links.MAC_BYTES))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(WrongSecret):
            connect(impostor.getsockname(), SECRET)
        thread.join()


def test_proof_is_worth_nothing_elsewhere(listener: Listener) -> None:
    """What one connection proved is refused on the next, whose nonce is another."""
    proofs = []
    for _ in range(2):
        accepted = Accepted(listener)
        with socket.create_connection(("127.0.0.1", listener.port)) as caller:
            caller.sendall(links.GREETING)
            greeting = links._read(caller, len(links.GREETING) + links.NONCE_BYTES)
            nonce, own = greeting[len(links.GREETING) :], b"n" * links.NONCE_BYTES
            proofs.append(own + SECRET.sign(b"caller", nonce, own))
            caller.sendall(proofs[0])
            answer = caller.recv(1)
        accepted.join()
        if accepted.link is not None:
            accepted.link.close()
    assert answer == links.REFUSED


def test_silent_strangers_keep_no_rank_waiting(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        accepted = Accepted(listener)
        ours = connect(("127.0.0.1", listener.port), SECRET)
        accepted.join()
        assert accepted.link is not None
        ours.close()
        accepted.link.close()


def test_nobody_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with pytest.raises(LinkClosed, match="--master-addr"):
            connect(probe.getsockname(), SECRET, wait_s=0.2)


def test_secrets_are_long(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_secret(file)
    file.write_text("short\n")
    with pytest.raises(InvalidConfig, match="5 bytes, under 16"):
        read_secret(file)
    file.write_text("0123456789abcdef\n")
    assert read_secret(file) == b"0123456789abcdef"


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"version": "2"}, "rank 3 has version '2', but rank 0 has '1'"),
        ({"config": {"rope_theta": 5.0}}, "rank 3 has another config: rope_theta=5.0, but rank 0 has 1.0: copy"),
        ({"config": {"rope_theta": 1.0, "new": 2}}, "another config: new=2, but rank 0 has None"),
        ({"weights": {"a": "1", "b": "3"}}, "other weights: 1 of 2 tensors differ, the first is b='3', .* has '2'"),
        ({"weights": {}}, "other weights: 2 of 2 tensors differ, the first is a=None"),
        ({"options": {"dtype": "float32"}}, "rank 3 has dtype='float32', but rank 0 has 'auto'"),
        ({"cpu_path": "generic"}, "'generic', but rank 0 has 'avx2': .*PENSTOCK_CPU"),
    ],
)
def test_ranks_are_compared(changed: dict[str, Any], message: str) -> None:
    own = Identity("1", {"rope_theta": 1.0}, {"a": "1", "b": "2"}, {"dtype": "auto"}, "avx2")
    require_equal(3, own, own)
    with pytest.raises(InvalidConfig, match=message):
        require_equal(3, own, msgspec.structs.replace(own, **changed))
