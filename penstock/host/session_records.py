"""Tokens of saved sessions, by name: with them a session is found in the store again, by another process too."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import InvalidRequest, quote
from penstock.host.files import UnreadableFile, read_regular

FOLDER, SUFFIX = "penstock-sessions-1", ".session"  # with the format's version
MAX_RECORDS = 256  # of a tenant; the oldest go first
MAX_BYTES = 64 << 20
NAME_BYTES, CHECK_BYTES = 12, 16


@dataclass(frozen=True)
class SessionRecord:
    """The tokens of a saved session, and its scope: it is restored within the same one."""

    tokens: tuple[int, ...]
    scope: str


def digest_scope(loras: Iterable[tuple[str, float]], salt: str) -> str:
    """Digest adapters by name and scale, and a salt, which may be secret."""
    named = [(name, float(scale)) for name, scale in loras]
    return hashlib.blake2b(repr((named, salt)).encode(), digest_size=CHECK_BYTES).hexdigest()


class SessionRecords:
    """Records in a folder readable by its user alone; without one, in memory."""

    def __init__(self, path: str | None = None) -> None:
        self._folder = None if path is None else Path(path).expanduser() / FOLDER
        self._kept: OrderedDict[str, SessionRecord] = OrderedDict()

    def write(self, tenant: str, name: str, record: SessionRecord) -> None:
        """Keep a record in place of the one of that name; raises OSError if it cannot be written."""
        key = _make_key(tenant, name)
        if self._folder is None:
            self._kept[key] = record
            self._kept.move_to_end(key)
            mine = [one for one in self._kept if one.startswith(_start(tenant))]
            for old in mine[:-MAX_RECORDS]:
                del self._kept[old]
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{self._folder} is open to other users")
        data = json.dumps(asdict(record)).encode()
        fresh = self._folder / f"{secrets.token_hex(8)}.new"
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                opened.write(_check(data) + data)
            fresh.replace(self._folder / (key + SUFFIX))
        finally:
            fresh.unlink(missing_ok=True)
        for path in sorted(self._folder.glob(f"{_start(tenant)}*{SUFFIX}"), key=_age)[:-MAX_RECORDS]:
            path.unlink(missing_ok=True)

    def read(self, tenant: str, name: str) -> SessionRecord | None:
        """Return a record; None if there is none. One that is damaged is removed, and raises InvalidRequest."""
        key = _make_key(tenant, name)
        if self._folder is None:
            return self._kept.get(key)
        path = self._folder / (key + SUFFIX)
        if not path.exists():
            return None
        try:
            raw = read_regular(path, MAX_BYTES)
            check, data = raw[:CHECK_BYTES], raw[CHECK_BYTES:]
            if check == _check(data):
                values = json.loads(data)
                return SessionRecord(tuple(map(int, values["tokens"])), str(values["scope"]))
        except (UnreadableFile, ValueError, KeyError, TypeError):
            pass
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise InvalidRequest(f"session {quote(name)}: what was saved is damaged, and was removed: save it again")

    def erase(self, tenant: str, name: str) -> SessionRecord | None:
        """Remove a record, and return it; None if there is none that can be read."""
        key, record = _make_key(tenant, name), None
        with suppress(InvalidRequest):
            record = self.read(tenant, name)
        self._kept.pop(key, None)
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / (key + SUFFIX)).unlink(missing_ok=True)
        return record

    def forget(self) -> None:
        """Remove all."""
        self._kept.clear()
        for path in [] if self._folder is None else list(self._folder.glob(f"*{SUFFIX}")):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _start(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), digest_size=NAME_BYTES).hexdigest() + "-"


def _make_key(tenant: str, name: str) -> str:
    return _start(tenant) + hashlib.blake2b(name.encode(), digest_size=NAME_BYTES).hexdigest()


def _check(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECK_BYTES).digest()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
