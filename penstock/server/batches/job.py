"""Run one batch: validate its input, post its lines, record results, publish files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from penstock.errors import quote
from penstock.server.batch.entries import ID as LINE_ID
from penstock.server.batch.entries import BadEntry, BatchEntry, make_result, parse_entry
from penstock.server.batches.state import (
    CANCELLED,
    CANCELLING,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchState,
    Journal,
    LineError,
    publish,
)
from penstock.server.connections.body_memory import MAX_LIGHT_BYTES, SMALL_BYTES
from penstock.server.files.routes import run_on_disk
from penstock.server.files.store import RECORD, FileStore, write_record
from penstock.server.http.context import new_id
from penstock.server.http.decode import check_size
from penstock.server.http.errors import ApiError, to_api_error

INITIAL_LIMIT = 1  # before a model is loaded
MAX_LINES = 50_000  # OpenAI's limit
MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100  # reported per file
log = logging.getLogger("penstock.server")
RETRIED = (429, 503)  # busy or stopping
PAUSES_S = (0.5, 30.0)  # retry backoff: first and longest
POLL_S = 1.0  # how often expiry is checked


class ConcurrencyLimit:
    """A FIFO limit that can grow. Inputs are validated one at a time (`checking`)."""

    def __init__(self, limit: int = INITIAL_LIMIT) -> None:
        self.limit = limit
        self.validation_lock = asyncio.Lock()
        self._free = asyncio.Semaphore(limit)

    def grow(self, limit: int) -> None:
        for _ in range(limit - self.limit):
            self._free.release()
        self.limit = max(self.limit, limit)

    async def __aenter__(self) -> None:
        await self._free.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._free.release()


class InputCheck:
    def __init__(self) -> None:
        self.num_lines = 0
        self.errors: list[LineError] = []


def check_lines(path: Path, endpoint: str, max_line_bytes: int) -> InputCheck:
    """Validate the input (blocks on the disk); stops early at too many errors."""
    result, seen = InputCheck(), set[str]()
    with open(path, "rb") as file:
        for number, line in _read_lines(file, max_line_bytes):
            try:
                entry = _parse_line(line, endpoint, max_line_bytes)
                if entry.custom_id in seen:
                    raise BadEntry(
                        "duplicate_custom_id",
                        f"another line before has custom_id={quote(entry.custom_id)}: give every line its own",
                    )
                seen.add(entry.custom_id)
            except BadEntry as bad:
                result.errors.append(LineError(code=bad.code, message=bad.message, line=number))
            result.num_lines += 1
            if result.num_lines > MAX_LINES:
                result.errors.append(
                    LineError(
                        code="too_many_requests",
                        message=f"the file has more than {MAX_LINES} requests: split it",
                        line=number,
                    )
                )
            if len(result.errors) >= MAX_ERRORS or result.num_lines > MAX_LINES:
                break
    if not result.num_lines:
        result.errors.append(LineError(code="empty_file", message="the file has no requests: write one on each line"))
    return result


def _parse_line(line: bytes, endpoint: str, max_line_bytes: int) -> BatchEntry:
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
    entry = parse_entry(line)
    if entry.url != endpoint:
        raise BadEntry("mismatched_endpoint", f"url={quote(entry.url)}: the batch is for {endpoint}")
    if len(entry.custom_id) > MAX_CUSTOM_ID_CHARS:
        raise BadEntry(
            "invalid_custom_id", f"custom_id has {len(entry.custom_id)} characters: the limit is {MAX_CUSTOM_ID_CHARS}"
        )
    return entry


class Lines:
    """Entries of a valid input, without those that are done; all methods block on the disk."""

    def __init__(self, path: Path, done: Container[str], max_line_bytes: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._lines = _read_lines(self._file, max_line_bytes)
        self._done = done

    def next(self) -> BatchEntry | None:
        for _, line in self._lines:
            entry = parse_entry(line)
            if entry.custom_id not in self._done:
                return entry
        return None

    def close(self) -> None:
        self._file.close()


def _read_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank; a line that is too large is cut and ends the file."""
    number = 0
    while line := file.readline(max_line_bytes + 2):
        number += 1
        if line.strip():
            yield number, line.rstrip(b"\r\n")
        if len(line) > max_line_bytes + 1:
            return


class BatchClient(Protocol):
    """Posts a batch's requests."""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Post and return status and body."""


class BatchJob:
    """A running batch. Cancelling `run` leaves it to be resumed, as a crash would."""

    def __init__(
        self,
        state: BatchState,
        folder: Path,
        files: FileStore,
        client: BatchClient,
        limit: ConcurrencyLimit,
        max_line_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = state
        self._folder, self._files, self._client, self._limit = folder, files, client, limit
        self._max_line_bytes, self._clock = max_line_bytes, clock
        self._journal: Journal | None = None
        self._lines: Lines | None = None
        self._reading, self._saving = asyncio.Lock(), asyncio.Lock()
        self._stop = asyncio.Event()  # set when cancelled by its client
        if state.status == CANCELLING:
            self._stop.set()

    async def save(self) -> None:
        async with self._saving:
            await run_on_disk(partial(write_record, self._folder / (self.state.id + RECORD), self.state))

    async def cancel(self) -> None:
        """Request cancellation; `run` carries it out."""
        if self.state.status in (VALIDATING, IN_PROGRESS):
            self.state.enter(CANCELLING, self._clock())
            self._stop.set()
            await self.save()

    async def run(self, tenant_lock: asyncio.Lock) -> None:
        """Run to the end. `tenant_lock` makes a tenant's batches run one after another."""
        state = self.state
        try:
            if state.status == VALIDATING:
                await self._validate()
            if state.status in (IN_PROGRESS, CANCELLING) and state.ending != CANCELLED:
                await self._answer_with_lock(tenant_lock)
            if not state.has_ended:
                await self._finish()
        except Exception as error:
            log.error("batch %s failed: %s", state.id, " ".join(str(error).split()), exc_info=True)
            self._fail(LineError(code="server_error", message="internal error; see the server's log"))
            state.enter(FAILED, self._clock())
            await self.save()

    async def _validate(self) -> None:
        state = self.state
        path = self._files.path_of(state.input_file_id)
        async with self._limit.validation_lock:
            result = await run_on_disk(lambda: check_lines(path, state.endpoint, self._max_line_bytes))
        state.num_lines, state.errors = result.num_lines, result.errors
        if result.errors:
            state.enter(FAILED, self._clock())
        elif state.status == VALIDATING:
            state.enter(IN_PROGRESS, self._clock())
        await self.save()

    async def _answer_with_lock(self, tenant_lock: asyncio.Lock) -> None:
        """Wait for the tenant's lock, unless cancelled first."""
        waits = [asyncio.ensure_future(tenant_lock.acquire()), asyncio.ensure_future(self._stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await self._answer()
        finally:
            if waits[0].done() and not waits[0].cancelled():
                tenant_lock.release()
            for wait in waits:
                wait.cancel()

    async def _answer(self) -> None:
        """Post all unanswered lines, until done, cancelled or expired."""
        path = self._files.path_of(self.state.input_file_id)
        self._journal = journal = await run_on_disk(lambda: Journal(self._folder, self.state, self._files))
        self._lines = await run_on_disk(lambda: Lines(path, journal, self._max_line_bytes))
        try:
            await self._ask_all()
            if self.state.ending == EXPIRED:
                await self._expire_rest(path)
            await run_on_disk(journal.name_files)
        finally:
            await run_on_disk(self._close)
        if self.state.status == CANCELLING:
            self.state.ending = CANCELLED
        else:
            self.state.enter(FINALIZING, self._clock())
        await self.save()

    def _close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._journal is not None:
            self._journal.close()

    async def _finish(self) -> None:
        await run_on_disk(
            partial(publish, self._folder, self.state, self._files, is_reserved=self._journal is not None)
        )
        self.state.enter(self.state.ending, self._clock())
        await self.save()
        log.info(
            "batch %s: %s, %d of %d lines answered, %d failed",
            self.state.id,
            self.state.status,
            self.state.num_completed,
            self.state.num_lines,
            self.state.num_failed,
        )

    def _fail(self, error: LineError) -> None:
        self.state.errors = [*self.state.errors, error]
        self.state.ending = FAILED

    async def _ask_all(self) -> None:
        workers: set[asyncio.Task[None]] = set()
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            while self.state.status == IN_PROGRESS:
                if self._clock() >= self.state.expires_at:
                    self.state.ending = EXPIRED
                    return
                if not self._is_exhausted:
                    workers |= {
                        asyncio.ensure_future(self._ask_lines()) for _ in range(self._limit.limit - len(workers))
                    }
                elif not workers:
                    return
                await asyncio.wait([stopped, *workers], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for worker in [worker for worker in workers if worker.done()]:
                    workers.remove(worker)
                    worker.result()
        except ApiError as error:
            self._fail(LineError(code=error.code or "server_error", message=error.message))
        finally:
            stopped.cancel()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    _is_exhausted = False  # the last line has been read

    async def _ask_lines(self) -> None:
        while not self._is_exhausted:
            await self._ask_next()

    async def _ask_next(self) -> None:
        """Post the next line. A large one keeps the reading lock, so that only one is in memory; waiting readers hold
        no slot of the limit."""
        assert self._lines is not None
        async with contextlib.AsyncExitStack() as slot:
            async with self._reading:
                await slot.enter_async_context(self._limit)
                entry = None if self._is_exhausted else await run_on_disk(self._lines.next)
                if entry is None:
                    self._is_exhausted = True
                    return
                if len(entry.body) > MAX_LIGHT_BYTES:
                    return await self._ask(entry)
            await self._ask(entry)

    async def _ask(self, entry: BatchEntry) -> None:
        assert self._journal is not None
        pause_s = PAUSES_S[0]
        while True:
            try:
                status, body = await self._client.post(entry.url, entry.body)
            except Exception as error:
                known = to_api_error(error)
                status, body = known.status, msgspec.json.encode(known.body())
            if status not in RETRIED:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
        await asyncio.shield(run_on_disk(partial(self._journal.append, make_result(entry, status, body))))

    async def _expire_rest(self, path: Path) -> None:
        def write(journal: Journal) -> None:
            with contextlib.closing(Lines(path, journal, self._max_line_bytes)) as rest:
                while (entry := rest.next()) is not None:
                    journal.append(_make_expired_result(entry))

        assert self._journal is not None
        try:
            await run_on_disk(partial(write, self._journal))
        except ApiError as error:
            self._fail(LineError(code=error.code or "server_error", message=error.message))


def _make_expired_result(entry: BatchEntry) -> dict[str, Any]:
    return {
        "id": new_id(LINE_ID),
        "custom_id": entry.custom_id,
        "response": None,
        "error": {"code": "batch_expired", "message": "the batch expired before this request was answered"},
    }
