"""Blocks over TCP, by name: a prefill server's engine serves those of its store, a decode server's engine fetches them.

Both sides prove a secret first. Then frames: names one way; the other way, for each name, a length, a checksum and the
bytes. What is not there has length 0. Nothing is unpickled, and each side knows how large a frame may be.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator, Sequence

from penstock.errors import InvalidConfig
from penstock.runner.ranks.link import Credentials, LinkClosed, Listener, RankLink
from penstock.runner.store.blocks import SENT, BlockStore
from penstock.runner.store.segment import CHECKSUM_BYTES, NAME_BYTES, checksum

HEAD = struct.Struct(f"<Q{CHECKSUM_BYTES}s")
MISSING = HEAD.pack(0, bytes(CHECKSUM_BYTES))
MAX_NAMES = 1024  # in a frame
REPLY_BYTES = 16 << 20  # of a frame with blocks, unless one block is larger
MAX_CALLERS = 32  # at once
IDLE_S = 30.0  # until a silent caller is let go
POLL_S = 0.5
_log = logging.getLogger(__name__)


class BlockServer:
    """Serves blocks of a store from a port, in threads."""

    def __init__(self, store: BlockStore, host: str, port: int, credentials: Credentials) -> None:
        self._store = store
        try:
            self._listener = Listener(host, port, credentials)
        except InvalidConfig as error:
            why = getattr(error.__cause__, "strerror", error)
            raise InvalidConfig(
                f"kv_transfer_port={port} cannot be listened on at {host} ({why}): give a free port, or 0 for any"
            ) from None
        self.port = self._listener.port
        self._callers: set[RankLink] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="penstock-kv-server", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                link = self._listener.accept(POLL_S)
            except (OSError, ValueError) as error:
                if not self._is_closed:
                    _log.warning("no more servers can fetch cache blocks here: %s", error)
                return
            if link is None:
                continue
            if len(self._callers) >= MAX_CALLERS:
                link.close()
                continue
            self._callers.add(link)
            threading.Thread(target=self._serve, args=(link,), name="penstock-kv-caller", daemon=True).start()

    def _serve(self, link: RankLink) -> None:
        try:
            while True:
                names = split_names(link.receive(IDLE_S, MAX_NAMES * NAME_BYTES))
                link.send(*self._list_parts(names))
        except LinkClosed:
            pass
        except Exception:
            _log.exception("cache blocks could not be sent to %s", link.peer)
        finally:
            self._callers.discard(link)
            link.close()

    def _list_parts(self, names: Sequence[bytes]) -> list[bytes]:
        """List what answers: each block's head and bytes, of as many as fit into a frame."""
        parts, num_bytes, count = [], 0, 0
        for name in names:
            data = self._store.read(name) if num_bytes < REPLY_BYTES else None
            if data is None:
                parts.append(MISSING)
                continue
            parts += [HEAD.pack(len(data), checksum(name, data)), data]
            num_bytes, count = num_bytes + len(data), count + 1
        self._store.note_traffic({SENT: count})
        return parts

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()
        for link in list(self._callers):
            link.end()


def split_names(frame: bytearray) -> list[bytes]:
    return [bytes(frame[at : at + NAME_BYTES]) for at in range(0, len(frame) - NAME_BYTES + 1, NAME_BYTES)]


def ask_for(
    link: RankLink, names: Sequence[bytes], max_block_bytes: int, wait_s: float
) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield each name with its block; None for one that is missing, damaged or larger than it may be."""
    most = min(MAX_NAMES, max(1, REPLY_BYTES // max_block_bytes))
    for at in range(0, len(names), most):
        some = names[at : at + most]
        link.send(b"".join(some))
        frame = memoryview(link.receive(wait_s, len(some) * (HEAD.size + max_block_bytes)))
        for name in some:
            if len(frame) < HEAD.size:
                raise LinkClosed(f"{link.peer} sent half of an answer")
            length, made = HEAD.unpack(frame[: HEAD.size])
            data, frame = frame[HEAD.size : HEAD.size + length], frame[HEAD.size + length :]
            is_whole = 0 < length == len(data) and checksum(name, data) == made
            yield name, bytes(data) if is_whole else None
