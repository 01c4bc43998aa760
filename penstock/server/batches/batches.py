"""All batches of a server (running, waiting, and recently ended) and their routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.errors import Busy, quote
from penstock.server.batch.entries import URLS, LocalClient
from penstock.server.batches.job import BatchClient, BatchJob, ConcurrencyLimit
from penstock.server.batches.state import ANSWERS, ERRORS, BatchState
from penstock.server.common.fields import RequestBody
from penstock.server.config import MIB
from penstock.server.files.routes import MIN_AGE_S, PURPOSE, make_page, run_on_disk
from penstock.server.files.store import BATCHES, DAY_S, FILES, MAX_AGE_S, RECORD, FileStore, read_records, remove_file
from penstock.server.http.context import Client, client_of, json_response, read_body
from penstock.server.http.errors import ApiError
from penstock.server.http.keys import KeyRing
from penstock.server.responses.body import Metadata
from penstock.server.state import Server

WINDOWS_S = {"24h": DAY_S}
log = logging.getLogger("penstock.server")
MAX_UNFINISHED = 64
MAX_ENDED = 1000  # per tenant, still listed
POLL_S = 0.5
SWEEP_S = 300.0
RETRY_S = 60
MAX_LISTED, LISTED = 100, 20


class OutputExpiry(RequestBody):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_AGE_S, le=MAX_AGE_S)


class BatchBody(RequestBody):
    input_file_id: str = Field(max_length=128)
    endpoint: Literal[URLS]  # type: ignore[valid-type]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class Batches:
    def __init__(
        self,
        folder: Path,
        files: FileStore,
        make_client: Callable[[str], BatchClient],
        max_line_bytes: int,
        *,
        count_rows: Callable[[], int] = lambda: 0,
        is_shared: Callable[[], bool] = lambda: False,
        is_stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make clients with `client_for(tenant)`; batches may use half of the engines' `num_rows()` sequences."""
        self.files = files
        self._folder, self._make_client, self._max_line_bytes = folder, make_client, max_line_bytes
        self._count_rows, self._is_shared, self._is_stopping, self._clock = count_rows, is_shared, is_stopping, clock
        self._limit = ConcurrencyLimit()
        self._states: dict[str, BatchState] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._tenant_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Load the batches on disk and resume unfinished ones."""
        states = await run_on_disk(lambda: list(read_records(self._folder, BatchState)))
        self._states = {state.id: state for state in sorted(states, key=lambda one: (one.created_at, one.id))}
        unfinished = [state for state in self._states.values() if not state.has_ended]
        named = [id for state in unfinished for id in (state.output_file_id, state.error_file_id) if id]
        await run_on_disk(partial(self.files.load, named))
        for state in unfinished:
            self._spawn(self._run(self._add(state)))
        self._spawn(self._maintain())

    async def close(self) -> None:
        """Stop; a later server resumes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(job)
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
        self._check_limit(tenant)
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
        job = self._add(state)
        try:
            self.files.find(tenant, file.id, "input_file_id")  # again, now that it is pinned
            await job.save()
        except BaseException:
            self._drop(job)
            del self._states[state.id]
            raise
        self._spawn(self._run(job))
        return state

    def _check_limit(self, tenant: str) -> None:
        unfinished = [job.state.tenant for job in self._jobs.values()]
        limit = MAX_UNFINISHED // 2 if self._is_shared() else MAX_UNFINISHED
        if unfinished.count(tenant) >= limit or len(unfinished) >= MAX_UNFINISHED:
            raise Busy(
                f"{unfinished.count(tenant)} of your batches and {len(unfinished)} in all are running: the "
                f"limits are {limit} and {MAX_UNFINISHED}; wait for one, or cancel one",
                RETRY_S,
            )

    def _add(self, state: BatchState) -> BatchJob:
        job = BatchJob(
            state,
            self._folder,
            self.files,
            self._make_client(state.tenant),
            self._limit,
            self._max_line_bytes,
            self._clock,
        )
        self._states[state.id], self._jobs[state.id] = state, job
        self.files.pin(state.input_file_id)
        return job

    def _drop(self, job: BatchJob) -> None:
        del self._jobs[job.state.id]
        self.files.pin(job.state.input_file_id, -1)

    async def _run(self, job: BatchJob) -> None:
        try:
            await job.run(self._tenant_locks[job.state.tenant])
        finally:
            self._drop(job)

    def list_for(self, tenant: str) -> list[BatchState]:
        """List a tenant's batches, oldest first."""
        return [state for state in self._states.values() if state.tenant == tenant]

    def find(self, tenant: str, id: str) -> BatchState:
        state = self._states.get(id)
        if state is None or state.tenant != tenant:
            raise ApiError(
                404, f"no batch {quote(id)}: it ended long ago, or is another client's", code="batch_not_found"
            )
        return state

    async def cancel(self, tenant: str, id: str) -> BatchState:
        state = self.find(tenant, id)
        job = self._jobs.get(id)
        if job is None or state.has_ended:
            raise ApiError(409, f"the batch has ended ({state.status}) and cannot be cancelled", code="batch_has_ended")
        await job.cancel()
        return state

    async def _maintain(self) -> None:
        """Raise the concurrency to half of the rows, and sweep old files. When the server stops, cancel all batches."""
        swept_s = float("-inf")
        while not self._is_stopping():
            self._limit.grow(self._count_rows() // 2)
            if time.monotonic() - swept_s > SWEEP_S:
                swept_s = time.monotonic()
                try:
                    await self.sweep()
                except ApiError as error:
                    log.warning("cannot remove old files and batches: %s", error.message)
            await asyncio.sleep(POLL_S)
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def sweep(self) -> None:
        """Delete expired files, and ended batches beyond the limits."""
        await run_on_disk(self.files.delete_expired)
        tenants: defaultdict[str, list[BatchState]] = defaultdict(list)
        for state in self._states.values():
            if state.has_ended and state.id not in self._jobs:
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
                await run_on_disk(partial(remove_file, self._folder / (state.id + suffix)))


def open_batches(app: ASGIApp, server: Server, ring: KeyRing, folder: Path) -> Batches:
    """Open batches and files under `folder`; they are read when the batches start."""

    files = FileStore(folder / FILES, server.config.max_files_mb * MIB, is_shared=lambda: len(ring.weights()) > 1)
    return Batches(
        folder / BATCHES,
        files,
        lambda tenant: LocalClient(app, Client(tenant, is_batch=True)),
        server.config.max_body_mb * MIB,
        count_rows=lambda: max((model.facts.max_num_seqs for model in server.catalog if model.is_loaded), default=0),
        is_shared=lambda: len(ring.weights()) > 1,
        is_stopping=lambda: server.is_draining,
    )


async def create_batch(request: Request) -> Response:
    body = await read_body(request, BatchBody)
    return json_response((await _batches(request).create(client_of(request).tenant, body)).as_json())


async def batches(request: Request) -> Response:
    found = _batches(request).list_for(client_of(request).tenant)
    return json_response(make_page(found, BatchState.as_json, request.query_params, MAX_LISTED, LISTED))


async def batch(request: Request) -> Response:
    return json_response(_batches(request).find(client_of(request).tenant, request.path_params["id"]).as_json())


async def cancel_batch(request: Request) -> Response:
    state = await _batches(request).cancel(client_of(request).tenant, request.path_params["id"])
    return json_response(state.as_json())


def _batches(request: Request) -> Batches:
    found: Batches | None = request.app.state.batches
    if found is None:
        raise ApiError(503, "batches are not available on this server")
    return found
