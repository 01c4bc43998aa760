"""Connections between ranks: both sides prove that they know the secret, then frames of bytes."""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EngineFailed, InvalidConfig, quote

GREETING = b"penstock ranks 2"
TLS_WANTED = b"penstock ranks T"  # of the same length: to who greets without TLS
TLS_RECORD = b"\x16"  # the first byte of who begins TLS
NONCE_BYTES, MAC_BYTES = 32, 32
GREETING_S = 10.0
RETRY_S = 0.1
POLL_S = 0.01  # while somebody is greeted
MAX_GREETERS = 64  # at once
ACCEPTED, REFUSED = b"+", b"-"
SECRET_VARIABLE = "PENSTOCK_DISTRIBUTED_SECRET"
MAX_FRAME_BYTES = 1 << 31
LENGTH = struct.Struct("<Q")
_log = logging.getLogger(__name__)
Bytes = bytes | bytearray | memoryview


class LinkClosed(EngineFailed):
    """The other side is gone, or does not answer."""


class WrongSecret(InvalidConfig):
    """The two sides do not know the same secret."""


class RefusedCertificate(InvalidConfig):
    """One side does not take the other's certificate, or has none."""


@dataclass(frozen=True)
class Credentials:
    """The secret that all ranks know and, for TLS, paths of a certificate, its key and the CA of all certificates."""

    secret: bytes
    certificate: str = ""
    key: str = ""
    ca: str = ""

    def make_context(self, is_server: bool) -> ssl.SSLContext | None:
        """Make the context of encrypted connections, if there is a certificate; both sides show theirs."""
        if not self.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # ranks are known by address; the CA is of this cluster alone
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise InvalidConfig(
                f"distributed_tls: {quote(self.certificate)}, {quote(self.key)} or {quote(self.ca)} cannot be used "
                f"({error}): give PEM files of a certificate, its key and its CA"
            ) from None
        return context

    def sign(self, role: bytes, *nonces: bytes) -> bytes:
        return hmac.digest(self.secret, role + b"".join(nonces), "sha256")


def connect(address: tuple[str, int], credentials: Credentials, wait_s: float = GREETING_S) -> RankLink:
    """Connect to a listener, which may be up to `wait_s` late, and prove the secret to each other."""
    context = credentials.make_context(is_server=False)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with contextlib.ExitStack() as stack:
                made = stack.enter_context(socket.create_connection(address, GREETING_S))
                if context is not None:
                    made = stack.enter_context(context.wrap_socket(made))
                _greet(made, address, credentials)
                stack.pop_all()
                return RankLink(made)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            failure: Exception = error  # it was ended, perhaps as the other side was
        except ssl.SSLError as error:
            raise RefusedCertificate(
                f"no TLS with {address[0]}:{address[1]} ({error.reason or error}): give all machines "
                "certificates of the same --distributed-tls-ca, or none"
            ) from None
        except (OSError, EOFError) as error:
            failure = error
        if time.monotonic() > deadline:
            raise LinkClosed(
                f"no rank 0 at {address[0]}:{address[1]} in {wait_s:g} s ({failure}): check that it was started, "
                "--master-addr, --master-port, and that all machines use TLS or none"
            )
        time.sleep(RETRY_S)


def _greet(made: socket.socket, address: tuple[str, int], credentials: Credentials) -> None:
    """The caller's side: prove the secret, and require the listener's proof."""
    made.sendall(GREETING)
    greeting = _read(made, len(GREETING))
    if greeting == TLS_WANTED:
        raise RefusedCertificate(
            f"{address[0]}:{address[1]} uses TLS: give this machine --distributed-tls-certfile, -keyfile and -ca, too"
        )
    if greeting != GREETING:
        raise EOFError("what answers is no rank of this version")
    nonce, own = _read(made, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    made.sendall(own + credentials.sign(b"caller", nonce, own))
    if _read(made, 1) == ACCEPTED and hmac.compare_digest(
        _read(made, MAC_BYTES), credentials.sign(b"listener", own, nonce)
    ):
        return
    raise WrongSecret(
        f"{address[0]}:{address[1]} has another secret: give all machines the same --distributed-secret-file or "
        f"{SECRET_VARIABLE}"
    )


class Listener:
    """Accepts connections of those who know the secret."""

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        self._credentials, self._context = credentials, credentials.make_context(is_server=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._greeted: queue.SimpleQueue[RankLink | None] = queue.SimpleQueue()  # None: one was refused
        self._greeters: list[threading.Thread] = []
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise InvalidConfig(
                f"cannot listen on {host}:{port} for ranks ({error.strerror}): set --master-addr to an address of "
                "this machine and --master-port to a free port"
            ) from error

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def accept(self, wait_s: float) -> RankLink | None:
        """Accept one connection that proves the secret; None if none came, or one that did not. Each is greeted in a
        thread of its own: who is silent keeps no rank waiting."""
        end = time.monotonic() + wait_s
        while self._greeted.empty():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return None
            is_greeting = any(thread.is_alive() for thread in self._greeters)
            if select.select([self._socket], [], [], min(left_s, POLL_S) if is_greeting else left_s)[0]:
                self._start_greeter(*self._socket.accept())
        return self._greeted.get()

    def _start_greeter(self, plain: socket.socket, peer: tuple[str, int]) -> None:
        self._greeters = [thread for thread in self._greeters if thread.is_alive()]
        if len(self._greeters) >= MAX_GREETERS:
            return plain.close()
        greeter = threading.Thread(target=self._greet, args=(plain, peer[0]), name="penstock-greeter", daemon=True)
        self._greeters.append(greeter)
        greeter.start()

    def _greet(self, plain: socket.socket, peer: str) -> None:
        plain.settimeout(GREETING_S)
        made = plain
        try:
            if self._context is not None:
                if plain.recv(1, socket.MSG_PEEK) != TLS_RECORD:
                    _read(plain, len(GREETING))
                    plain.sendall(TLS_WANTED)
                    raise EOFError("it does not use TLS, as this machine does")
                made = self._context.wrap_socket(plain, server_side=True)
            nonce = secrets.token_bytes(NONCE_BYTES)
            made.sendall(GREETING + nonce)
            if _read(made, len(GREETING)) != GREETING:
                raise EOFError("it is no rank of this version")
            proof = _read(made, NONCE_BYTES + MAC_BYTES)
            theirs, mac = proof[:NONCE_BYTES], proof[NONCE_BYTES:]
            if hmac.compare_digest(mac, self._credentials.sign(b"caller", nonce, theirs)):
                made.sendall(ACCEPTED + self._credentials.sign(b"listener", theirs, nonce))
                return self._greeted.put(RankLink(made))
            made.sendall(REFUSED)
            _log.warning("refused a rank from %s, which has another secret", peer)
        except ssl.SSLError as error:
            _log.warning("refused a connection from %s without TLS as here: %s", peer, error.reason or error)
        except (OSError, EOFError) as error:
            _log.warning("refused a connection from %s, which did not answer as a rank: %s", peer, error)
        made.close()
        self._greeted.put(None)

    def close(self) -> None:
        self._socket.close()


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError("it ended the connection")
        found += part
    return found


class RankLink:
    """A connection whose both sides have proved the secret. One thread may read while others write."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.host = str(connection.getsockname()[0])  # this side's address
        self.peer = str(connection.getpeername()[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._using = threading.Lock()  # TLS connections may not be read and written at once
        self._writing = threading.Lock()  # a frame is written whole

    def send(self, *parts: Bytes) -> None:
        """Send one frame."""
        length = sum(len(part) for part in parts)
        with self._writing:
            self._write(LENGTH.pack(length) + b"".join(parts) if length < 1 << 16 else LENGTH.pack(length))
            if length >= 1 << 16:
                for part in parts:
                    self._write(part)

    def receive(self, wait_s: float | None = None, max_bytes: int = MAX_FRAME_BYTES) -> bytearray:
        """Wait for the next frame of at most `max_bytes`; with `wait_s` only so long."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        (length,) = LENGTH.unpack(self._fill(bytearray(LENGTH.size), deadline))
        if length > max_bytes:
            raise LinkClosed(f"{self.peer} sent a frame of {length} bytes, over {max_bytes}")
        return self._fill(bytearray(length), deadline)

    def _fill(self, into: bytearray, deadline: float | None) -> bytearray:
        left = memoryview(into)
        while left:
            try:
                with self._using:
                    count = self._socket.recv_into(left)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._wait(select.POLLIN, deadline)
                continue
            except (OSError, ValueError) as error:
                raise LinkClosed(f"connection to {self.peer} lost: {error}") from None
            if not count:
                raise LinkClosed(f"connection to {self.peer} ended")
            left = left[count:]
        return into

    def _write(self, data: Bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            try:
                with self._using:
                    left = left[self._socket.send(left) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, None)
            except (OSError, ValueError) as error:
                raise LinkClosed(f"connection to {self.peer} lost: {error}") from None

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except ValueError:
            raise LinkClosed(f"connection to {self.peer} was closed") from None
        wait_ms = None if deadline is None else max(0.0, 1e3 * (deadline - time.monotonic()))
        if not poll.poll(wait_ms):
            raise LinkClosed(f"nothing came from {self.peer} in time")

    def end(self) -> None:
        """End the connection: who reads or writes it gets LinkClosed."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS goes on without encryption

    def close(self) -> None:
        self.end()
        self._socket.close()


def read_secret(path: Path) -> bytes:
    """Read a secret from a file: all of it but surrounding white space."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidConfig(
            f"distributed_secret_file={quote(str(path))} cannot be read ({error.strerror}): name a file that holds "
            "the secret of all machines"
        ) from None
    return require_long(secret, f"distributed_secret_file={quote(str(path))}")


MIN_SECRET_BYTES = 16


def require_long(secret: bytes, name: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidConfig(
            f"{name} holds a secret of {len(secret)} bytes, under {MIN_SECRET_BYTES}: make one with "
            "openssl rand -hex 32"
        )
    return secret
