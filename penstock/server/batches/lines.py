"""The lines of a batch's input: checked all of them before the first is asked, then read one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import IO

from penstock.errors import shown
from penstock.server.batch.entries import BadEntry, Entry, parse
from penstock.server.batches.state import LineError
from penstock.server.decode import check_size
from penstock.server.errors import ApiError
from penstock.server.room import SMALL_BYTES

MAX_LINES = 50_000  # OpenAI's
MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100  # told of one file


class Checked:
    """The result of going through the whole input."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.errors: list[LineError] = []


def check_lines(path: Path, endpoint: str, max_line_bytes: int) -> Checked:
    """Go through the input (waits for the disk); too many errors end it early."""
    checked, seen = Checked(), set[str]()
    with open(path, "rb") as file:
        for number, line in _numbered(file, max_line_bytes):
            try:
                entry = _checked(line, endpoint, max_line_bytes)
                if entry.custom_id in seen:
                    raise BadEntry(
                        "duplicate_custom_id",
                        f"another line before has custom_id={shown(entry.custom_id)}: give every line its own",
                    )
                seen.add(entry.custom_id)
            except BadEntry as bad:
                checked.errors.append(LineError(code=bad.code, message=bad.message, line=number))
            checked.num_lines += 1
            if checked.num_lines > MAX_LINES:
                checked.errors.append(
                    LineError(
                        code="too_many_requests",
                        message=f"the file has more than {MAX_LINES} requests: split it",
                        line=number,
                    )
                )
            if len(checked.errors) >= MAX_ERRORS or checked.num_lines > MAX_LINES:
                break
    if not checked.num_lines:
        checked.errors.append(LineError(code="empty_file", message="the file has no requests: write one on each line"))
    return checked


def _checked(line: bytes, endpoint: str, max_line_bytes: int) -> Entry:
    if len(line) > max_line_bytes:
        raise BadEntry(
            "line_too_large",
            f"the line has more than {max_line_bytes} bytes: shorten it, or start the "
            "server with a larger --max-body-mb",
        )
    if len(line) > SMALL_BYTES:
        try:
            check_size(bytearray(line), max_line_bytes)
        except ApiError as error:
            raise BadEntry("line_too_large", error.message) from None
    entry = parse(line)
    if entry.url != endpoint:
        raise BadEntry("mismatched_endpoint", f"url={shown(entry.url)}: the batch is for {endpoint}")
    if len(entry.custom_id) > MAX_CUSTOM_ID_CHARS:
        raise BadEntry(
            "invalid_custom_id", f"custom_id has {len(entry.custom_id)} characters: the limit is {MAX_CUSTOM_ID_CHARS}"
        )
    return entry


class Lines:
    """Entries of an input that was found good, without those that are done. Every method waits for the disk."""

    def __init__(self, path: Path, done: Container[str], max_line_bytes: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._lines = _numbered(self._file, max_line_bytes)
        self._done = done

    def next(self) -> Entry | None:
        for _, line in self._lines:
            entry = parse(line)
            if entry.custom_id not in self._done:
                return entry
        return None

    def close(self) -> None:
        self._file.close()


def _numbered(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank; of one that is too large its beginning, and the file ends there."""
    number = 0
    while line := file.readline(max_line_bytes + 2):
        number += 1
        if line.strip():
            yield number, line.rstrip(b"\r\n")
        if len(line) > max_line_bytes + 1:
            return
