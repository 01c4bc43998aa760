"""The file of answers: appended to line by line, and read first to know what is done."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.batch.entries import ID

BEGINNING = b'{"id":"' + ID.encode()


class Output:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()  # custom ids
        self.bad_lines: set[int] = set()  # of the input, that were refused
        self.num_lines = self.num_failed = 0
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None
        try:
            self._read()
        except OSError as error:
            self._file.close()
            raise InvalidRequest(f"{path} cannot be read back: {error.strerror or error}; give a plain file") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, result: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()
        self._count(result)

    def _read(self) -> None:
        """Take in what is there; a last line that a killed process wrote half is removed."""
        self._file.seek(0)
        begin = 0
        for number, line in enumerate(self._file, start=1):
            result = _decode(line)
            if result is not None:
                self._count(result)
            elif line.endswith(b"\n") or not (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
                raise InvalidRequest(
                    f"{self.path} line {number} is no answer of a batch, so nothing was written: give "
                    "the name of a new file, or of one that run-batch made"
                )
            else:
                self._file.truncate(begin)
                return
            begin += len(line)
            if not line.endswith(b"\n"):
                self._file.write(b"\n")
                self._file.flush()

    def _count(self, result: dict[str, Any]) -> None:
        if result["custom_id"] is not None:
            self.done.add(result["custom_id"])
        if result["error"]:
            self.bad_lines.add(result["error"].get("line"))
        self.num_lines += 1
        self.num_failed += result["response"] is None or result["response"]["status_code"] >= 400


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        result = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    whole = isinstance(result, dict) and {"custom_id", "response", "error"} <= result.keys()
    return result if whole else None
