"""TLS between ranks: a handshake of both sides over loopback, and certificates of others."""

from __future__ import annotations

import logging
import secrets
import select
import threading
from pathlib import Path

import pytest

from penstock.errors import InvalidConfig
from penstock.runner.ranks.link import Credentials, LinkClosed, Listener, RankLink, RefusedCertificate, connect
from tests.hardening.pem import sign_pem, write_pem
from tests.parallel.test_links import SECRET, Accepted


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> list[Credentials]:
    """Two machines of one CA, and one of another that knows the secret."""
    folder = tmp_path_factory.mktemp("tls")
    own, foreign = write_pem(folder / "ca", "ca"), write_pem(folder / "foreign", "ca")
    made = []
    for number, ca in enumerate((own, own, foreign)):
        certificate, key = sign_pem(folder / str(number), ca)
        made.append(Credentials(SECRET.secret, str(certificate), str(key), str(ca[0])))
    return made


def meet(listening: Credentials, calling: Credentials) -> tuple[RankLink, RankLink]:
    listener = Listener("127.0.0.1", 0, listening)
    accepted = Accepted(listener)
    try:
        ours = connect(("127.0.0.1", listener.port), calling)
    finally:
        accepted.join()
        listener.close()
    assert accepted.link is not None
    return ours, accepted.link


def test_frames_go_both_ways_at_once(machines: list[Credentials]) -> None:
    ours, theirs = meet(machines[0], machines[1])
    frames = [secrets.token_bytes(size) for size in (0, 1, 1 << 16, 3 << 20, 5)]

    def send(link: RankLink) -> None:
        for frame in frames:
            link.send(frame[:1], frame[1:])

    senders = [threading.Thread(target=send, args=(link,)) for link in (ours, theirs)]
    for sender in senders:
        sender.start()
    received: list[bytearray] = []
    reader = threading.Thread(target=lambda: received.extend(theirs.receive(10.0) for _ in frames))
    reader.start()
    assert [ours.receive(10.0) for _ in frames] == frames
    for thread in (*senders, reader):
        thread.join()
    assert received == frames
    with pytest.raises(LinkClosed, match="in time"):
        theirs.receive(0.05)
    ours.close()
    with pytest.raises(LinkClosed, match="ended"):
        theirs.receive(5.0)
    theirs.close()


def test_ended_connection_is_still_encrypted(machines: list[Credentials]) -> None:
    """One thread ends it while others read and write: nothing is sent, or read, as if there were no TLS."""
    ours, theirs = meet(machines[0], machines[1])
    ours.send(b"x" * 1000)
    assert select.select([theirs._socket], [], [], 5.0)[0]
    theirs.end()
    assert theirs.receive(1.0) == b"x" * 1000
    for use in (lambda: theirs.send(b"secret"), lambda: theirs.receive(1.0), lambda: ours.receive(1.0)):
        with pytest.raises(LinkClosed):
            use()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("foreign", [0, 1])
def test_certificate_of_another_ca(foreign: int, machines: list[Credentials], caplog: pytest.LogCaptureFixture) -> None:
    """Refused at once with one line on each side, whoever has it, though it knows the secret."""
    pair = [machines[0], machines[1]]
    pair[foreign] = machines[2]
    with caplog.at_level(logging.WARNING), pytest.raises(RefusedCertificate) as refused:
        meet(*pair)
    assert "--distributed-tls-ca" in str(refused.value) and "\n" not in str(refused.value)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("refused a connection from 127.0.0.1")


def test_caller_alone_with_tls(machines: list[Credentials]) -> None:
    with pytest.raises(RefusedCertificate, match="or none"):
        meet(SECRET, machines[0])


def test_listener_alone_with_tls(machines: list[Credentials], caplog: pytest.LogCaptureFixture) -> None:
    """The caller is told at once, and does not try again until the deadline."""
    with caplog.at_level(logging.WARNING), pytest.raises(RefusedCertificate, match="uses TLS: give this machine"):
        meet(machines[0], SECRET)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "does not use TLS, as this machine does" in line


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    """Refused before the listener waits for ranks."""
    file = tmp_path / "cert.pem"
    file.write_text("no certificate")
    for path in (file, tmp_path / "none.pem"):
        with pytest.raises(InvalidConfig, match="cannot be used .*: give PEM files"):
            Listener("127.0.0.1", 0, Credentials(b"s" * 32, str(path), str(path), str(path)))
