"""A multipart body on its way to disk: its one file is written as it comes, its fields are kept."""

from __future__ import annotations

import logging
import os

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from penstock.errors import shown
from penstock.server.errors import ApiError
from penstock.server.files.durable import remove
from penstock.server.files.store import FileStore, append, new_file_id

MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
MAX_PREAMBLE_BYTES = 4096
MAX_NAME_CHARS = 255
BUFFER_BYTES = 64 * 1024
FORM = "multipart/form-data"

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with a body is told to its client


class Upload:
    """`feed` and `finish` wait for the disk. Whatever happens, `close` follows."""

    def __init__(self, store: FileStore, tenant: str, content_type: bytes) -> None:
        self.id = new_file_id()
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self.is_complete = False  # the last boundary has come
        self._store, self._tenant = store, tenant
        self._path = store.unfinished_path(self.id)
        self._parser = _make_parser(
            content_type,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_header_field": self._take_name,
                "on_header_value": self._take_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )
        self._num_fed = self._num_parts = 0
        self._header = b"", b""
        self._disposition = b""
        self._field: str | None = None  # the part's name, where it is no file
        self._value = bytearray()
        self._buffer = bytearray()  # of the file
        self._is_kept = False

    def feed(self, data: bytes) -> None:
        if self.is_complete:
            return  # an epilogue
        self._num_fed += len(data)
        if data.count(self._parser.boundary) > MAX_PARTS:  # the parser takes 1 us for each
            raise _invalid(f"its boundary comes more than {MAX_PARTS} times")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from None
        if not self._num_parts and self._num_fed > MAX_PREAMBLE_BYTES:
            raise _invalid("no part begins")

    def finish(self) -> None:
        """Check that all has come, and put the data where it stays."""
        if not self.is_complete:
            raise _invalid("its last boundary is missing")
        if self.filename is None:
            raise ApiError(
                400,
                "missing required parameter: 'file'; send it as a part with a filename",
                param="file",
                code="missing_required_parameter",
            )
        self._flush()
        if not self.num_bytes:
            raise ApiError(
                400, "the file is empty: send one with a request on each line", param="file", code="invalid_value"
            )
        handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(self._path, self._store.path_of(self.id))

    def keep(self) -> None:
        """The file has been recorded: its bytes stay reserved."""
        self._is_kept = True

    def close(self) -> None:
        if not self._is_kept:
            remove(self._path)
            remove(self._store.path_of(self.id))
            self._store.release(self._tenant, self.num_bytes)
            self._is_kept = True

    # the parser's calls

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        self._field, self._disposition = None, b""
        self._value.clear()

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0] + data[start:end], self._header[1]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0], self._header[1] + data[start:end]

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _invalid("a part has no name")
        name = options[b"name"].decode(errors="replace")
        if b"filename" not in options:
            self._field = name
        elif name != "file" or self.filename is not None:
            raise ApiError(
                400,
                f"there is a file in the part {shown(name)}: send one file, in the part 'file'",
                param="file",
                code="invalid_value",
            )
        else:
            self.filename = _plain_name(options[b"filename"])

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._buffer += data[start:end]
            if self.num_bytes + len(self._buffer) > self._store.max_file_bytes:
                raise ApiError(
                    413,
                    f"the file is larger than {self._store.max_file_bytes} bytes: split it",
                    param="file",
                    code="file_too_large",
                    headers={"Connection": "close"},
                )
            if len(self._buffer) >= BUFFER_BYTES:
                self._flush()
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise ApiError(
                400,
                f"the field {shown(self._field)} has more than {MAX_FIELD_BYTES} bytes: shorten it",
                code="invalid_value",
            )

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True

    def _flush(self) -> None:
        self._store.reserve(self._tenant, len(self._buffer))
        self.num_bytes += len(self._buffer)
        append(self._path, bytes(self._buffer))
        self._buffer.clear()


def _make_parser(content_type: bytes, calls: dict[str, object]) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    if kind != FORM.encode() or b"boundary" not in options:
        raise ApiError(
            415,
            f"Content-Type: {shown(content_type.decode('latin-1'))}: send the file as {FORM} with a "
            "boundary, as OpenAI's clients do",
            code="not_a_form",
        )
    try:
        return MultipartParser(options[b"boundary"], calls)  # type: ignore[arg-type]
    except FormParserError as error:
        raise _invalid(str(error)) from None


def _plain_name(name: bytes) -> str:
    """To be told again, on one line."""
    text = name.decode(errors="replace")
    return "".join(char if char.isprintable() else "_" for char in text[:MAX_NAME_CHARS]) or "file"


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is no valid {FORM}: {why}", code="invalid_form", headers={"Connection": "close"})
