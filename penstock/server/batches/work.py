"""Answering one batch: check its input, ask line by line, write down what was said, make files of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.server.batch.entries import ID as LINE_ID
from penstock.server.batch.entries import Entry, answered
from penstock.server.batches.journal import Journal, publish
from penstock.server.batches.lines import Lines, check_lines
from penstock.server.batches.state import (
    CANCELLED,
    CANCELLING,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchState,
    LineError,
)
from penstock.server.batches.turns import Turns
from penstock.server.context import new_id
from penstock.server.errors import ApiError, as_api_error
from penstock.server.files.durable import RECORD, write_record
from penstock.server.files.routes import on_disk
from penstock.server.files.store import FileStore
from penstock.server.room import MAX_LIGHT_BYTES

log = logging.getLogger("penstock.server")

RETRIED = (429, 503)  # the server is busy, or stops: asked again
PAUSES_S = (0.5, 30.0)  # before asking again: the first, and the longest
LOOK_S = 1.0  # how often the end of the time is looked for


class Asking(Protocol):
    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""


class Work:
    """A batch on its way. Cancelling `run` leaves it as if the server had been killed: to be gone on with."""

    def __init__(
        self,
        state: BatchState,
        folder: Path,
        files: FileStore,
        client: Asking,
        turns: Turns,
        max_line_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = state
        self._folder, self._files, self._client, self._turns = folder, files, client, turns
        self._max_line_bytes, self._clock = max_line_bytes, clock
        self._journal: Journal | None = None
        self._lines: Lines | None = None
        self._reading, self._saving = asyncio.Lock(), asyncio.Lock()
        self._stop = asyncio.Event()  # cancelled by its client
        if state.status == CANCELLING:
            self._stop.set()

    async def save(self) -> None:
        async with self._saving:
            await on_disk(partial(write_record, self._folder / (self.state.id + RECORD), self.state))

    async def cancel(self) -> None:
        """Ask for its end; `run` brings it about."""
        if self.state.status in (VALIDATING, IN_PROGRESS):
            self.state.enter(CANCELLING, self._clock())
            self._stop.set()
            await self.save()

    async def run(self, own_turn: asyncio.Lock) -> None:
        """Bring the batch to its end. `own_turn` is the tenant's: its batches are answered one after another."""
        state = self.state
        try:
            if state.status == VALIDATING:
                await self._validate()
            if state.status in (IN_PROGRESS, CANCELLING) and state.ending != CANCELLED:
                await self._answer_in_turn(own_turn)
            if not state.has_ended:
                await self._finish()
        except Exception as error:
            log.error("batch %s failed: %s", state.id, " ".join(str(error).split()), exc_info=True)
            self._fail(LineError(code="server_error", message="the server failed on this batch; its log says where"))
            state.enter(FAILED, self._clock())
            await self.save()

    async def _validate(self) -> None:
        state = self.state
        path = self._files.path_of(state.input_file_id)
        async with self._turns.checking:
            checked = await on_disk(lambda: check_lines(path, state.endpoint, self._max_line_bytes))
        state.num_lines, state.errors = checked.num_lines, checked.errors
        if checked.errors:
            state.enter(FAILED, self._clock())
        elif state.status == VALIDATING:
            state.enter(IN_PROGRESS, self._clock())
        await self.save()

    async def _answer_in_turn(self, own_turn: asyncio.Lock) -> None:
        """Wait for the turn, unless it is cancelled before."""
        waits = [asyncio.ensure_future(own_turn.acquire()), asyncio.ensure_future(self._stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await self._answer()
        finally:
            if waits[0].done() and not waits[0].cancelled():
                own_turn.release()
            for wait in waits:
                wait.cancel()

    async def _answer(self) -> None:
        """Ask what has not been answered, until all is, or it is cancelled, or its time is over."""
        path = self._files.path_of(self.state.input_file_id)
        self._journal = journal = await on_disk(lambda: Journal(self._folder, self.state, self._files))
        self._lines = await on_disk(lambda: Lines(path, journal, self._max_line_bytes))
        try:
            await self._ask_all()
            if self.state.ending == EXPIRED:
                await self._expire_rest(path)
            await on_disk(journal.name_files)
        finally:
            await on_disk(self._close)
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
        await on_disk(partial(publish, self._folder, self.state, self._files, is_reserved=self._journal is not None))
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

    # lines

    async def _ask_all(self) -> None:
        workers: set[asyncio.Task[None]] = set()
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            while self.state.status == IN_PROGRESS:
                if self._clock() >= self.state.expires_at:
                    self.state.ending = EXPIRED
                    return
                if not self._is_read:
                    workers |= {
                        asyncio.ensure_future(self._ask_lines()) for _ in range(self._turns.limit - len(workers))
                    }
                elif not workers:
                    return
                await asyncio.wait([stopped, *workers], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
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

    _is_read = False  # the last line has been taken

    async def _ask_lines(self) -> None:
        while not self._is_read:
            await self._ask_next()

    async def _ask_next(self) -> None:
        """One line; of large ones only one is in memory, because no other line is read meanwhile. Who waits to read has
        no turn, so that a large line takes no more than one."""
        assert self._lines is not None
        async with contextlib.AsyncExitStack() as turn:
            async with self._reading:
                await turn.enter_async_context(self._turns)
                entry = None if self._is_read else await on_disk(self._lines.next)
                if entry is None:
                    self._is_read = True
                    return
                if len(entry.body) > MAX_LIGHT_BYTES:
                    return await self._ask(entry)
            await self._ask(entry)

    async def _ask(self, entry: Entry) -> None:
        assert self._journal is not None
        pause_s = PAUSES_S[0]
        while True:
            try:
                status, body = await self._client.post(entry.url, entry.body)
            except Exception as error:
                known = as_api_error(error)
                status, body = known.status, msgspec.json.encode(known.body())
            if status not in RETRIED:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
        await asyncio.shield(on_disk(partial(self._journal.append, answered(entry, status, body))))

    async def _expire_rest(self, path: Path) -> None:
        def write(journal: Journal) -> None:
            with contextlib.closing(Lines(path, journal, self._max_line_bytes)) as rest:
                while (entry := rest.next()) is not None:
                    journal.append(_expired(entry))

        assert self._journal is not None
        try:
            await on_disk(partial(write, self._journal))
        except ApiError as error:
            self._fail(LineError(code=error.code or "server_error", message=error.message))


def _expired(entry: Entry) -> dict[str, Any]:
    return {
        "id": new_id(LINE_ID),
        "custom_id": entry.custom_id,
        "response": None,
        "error": {
            "code": "batch_expired",
            "message": "this request could not be answered before the batch's time was over",
        },
    }
