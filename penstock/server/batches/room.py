"""All batches of a server: those that run, those that wait, and those that have ended and are told for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import Busy, shown
from penstock.server.batches.body import WINDOWS_S, BatchBody
from penstock.server.batches.journal import ANSWERS, ERRORS
from penstock.server.batches.state import BatchState
from penstock.server.batches.turns import Turns
from penstock.server.batches.work import Asking, Work
from penstock.server.errors import ApiError
from penstock.server.files.durable import RECORD, read_records, remove
from penstock.server.files.routes import PURPOSE, on_disk
from penstock.server.files.store import MAX_AGE_S, FileStore

log = logging.getLogger("penstock.server")

MAX_UNFINISHED = 64
MAX_ENDED = 1000  # of a tenant, that are still told
LOOK_S = 0.5
SWEEP_S = 300.0
RETRY_S = 60


class Batches:
    def __init__(
        self,
        folder: Path,
        files: FileStore,
        client_for: Callable[[str], Asking],
        max_line_bytes: int,
        *,
        num_rows: Callable[[], int] = lambda: 0,
        is_shared: Callable[[], bool] = lambda: False,
        is_stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`client_for` asks as a tenant; `num_rows` is how many sequences the engines run, half of which batches may
        have."""
        self.files = files
        self._folder, self._client_for, self._max_line_bytes = folder, client_for, max_line_bytes
        self._num_rows, self._is_shared, self._is_stopping, self._clock = num_rows, is_shared, is_stopping, clock
        self._turns = Turns()
        self._states: dict[str, BatchState] = {}
        self._works: dict[str, Work] = {}
        self._own_turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Read what an earlier server left, and go on with what it had not ended."""
        states = await on_disk(lambda: list(read_records(self._folder, BatchState)))
        self._states = {state.id: state for state in sorted(states, key=lambda one: (one.created_at, one.id))}
        unfinished = [state for state in self._states.values() if not state.has_ended]
        named = [id for state in unfinished for id in (state.output_file_id, state.error_file_id) if id]
        await on_disk(partial(self.files.load, named))
        for state in unfinished:
            self._spawn(self._run(self._add(state)))
        self._spawn(self._look_after())

    async def close(self) -> None:
        """Stop where they are; a later server goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def create(self, tenant: str, body: BatchBody) -> BatchState:
        file = self.files.find(tenant, body.input_file_id, "input_file_id")
        if file.purpose != PURPOSE:
            raise ApiError(
                400,
                f"{file.id} has the purpose {file.purpose!r}: give a file of purpose {PURPOSE!r}",
                param="input_file_id",
                code="invalid_value",
            )
        self._check_number(tenant)
        now = int(self._clock())
        expiry = body.output_expires_after
        state = BatchState(
            tenant=tenant,
            input_file_id=file.id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + WINDOWS_S[body.completion_window],
            metadata=body.metadata,
            output_lifetime_s=None if expiry is None else expiry.seconds,
        )
        work = self._add(state)
        try:
            self.files.find(tenant, file.id, "input_file_id")  # now that it is pinned: a thread may delete it
            await work.save()
        except BaseException:
            self._drop(work)
            del self._states[state.id]
            raise
        self._spawn(self._run(work))
        return state

    def _check_number(self, tenant: str) -> None:
        unfinished = [work.state.tenant for work in self._works.values()]
        most = MAX_UNFINISHED // 2 if self._is_shared() else MAX_UNFINISHED
        if unfinished.count(tenant) >= most or len(unfinished) >= MAX_UNFINISHED:
            raise Busy(
                f"{unfinished.count(tenant)} batches of yours and {len(unfinished)} in all have not ended: the "
                f"limits are {most} and {MAX_UNFINISHED}; wait for one, or cancel one",
                RETRY_S,
            )

    def _add(self, state: BatchState) -> Work:
        work = Work(
            state,
            self._folder,
            self.files,
            self._client_for(state.tenant),
            self._turns,
            self._max_line_bytes,
            self._clock,
        )
        self._states[state.id], self._works[state.id] = state, work
        self.files.pin(state.input_file_id)
        return work

    def _drop(self, work: Work) -> None:
        del self._works[work.state.id]
        self.files.pin(work.state.input_file_id, -1)

    async def _run(self, work: Work) -> None:
        try:
            await work.run(self._own_turns[work.state.tenant])
        finally:
            self._drop(work)

    # asking after them

    def all_of(self, tenant: str) -> list[BatchState]:
        """Oldest first."""
        return [state for state in self._states.values() if state.tenant == tenant]

    def find(self, tenant: str, id: str) -> BatchState:
        state = self._states.get(id)
        if state is None or state.tenant != tenant:
            raise ApiError(
                404,
                f"there is no batch {shown(id)} here: it ended long ago, or is another client's",
                code="batch_not_found",
            )
        return state

    async def cancel(self, tenant: str, id: str) -> BatchState:
        state = self.find(tenant, id)
        work = self._works.get(id)
        if work is None or state.has_ended:
            raise ApiError(
                409, f"the batch has ended ({state.status}): there is nothing to cancel", code="batch_has_ended"
            )
        await work.cancel()
        return state

    # looking after them

    async def _look_after(self) -> None:
        """Let batches have half of the rows, once there are some; forget what is old. When the server stops, so do
        they, and nobody waits for them."""
        swept_s = float("-inf")
        while not self._is_stopping():
            self._turns.grow(self._num_rows() // 2)
            if time.monotonic() - swept_s > SWEEP_S:
                swept_s = time.monotonic()
                try:
                    await self.sweep()
                except ApiError as error:
                    log.warning("old files and batches were not removed: %s", error.message)
            await asyncio.sleep(LOOK_S)
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def sweep(self) -> None:
        await on_disk(self.files.delete_expired)
        tenants: defaultdict[str, list[BatchState]] = defaultdict(list)
        for state in self._states.values():
            if state.has_ended and state.id not in self._works:
                tenants[state.tenant].append(state)
        old = [
            state
            for ended in tenants.values()
            for at, state in enumerate(reversed(ended))
            if at >= MAX_ENDED or state.created_at + 2 * MAX_AGE_S < self._clock()
        ]
        for state in old:
            del self._states[state.id]
            for suffix in (RECORD, ANSWERS, ERRORS):
                await on_disk(partial(remove, self._folder / (state.id + suffix)))
