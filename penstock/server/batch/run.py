"""Run a batch: many requests at once, each written when it is done."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.config import GPU_SEQS, EngineConfig
from penstock.errors import EngineFailed, InvalidRequest
from penstock.host.interrupts import INTERRUPTED
from penstock.host.progress import counting_bar
from penstock.server.app import make_app
from penstock.server.batch.entries import (
    BadEntry,
    BatchEntry,
    LocalClient,
    OutputFile,
    make_error_result,
    make_result,
    parse_entry,
)
from penstock.server.catalog import Catalog, make_catalog
from penstock.server.config import ServerConfig
from penstock.server.connections.slots import raise_limit
from penstock.server.engines.process import private_folder
from penstock.server.http.errors import to_api_error
from penstock.server.http.keys import KeyRing
from penstock.server.metrics import Metrics
from penstock.server.run import RELOADING, STOPPING
from penstock.server.state import Server

MAX_LINE_BYTES = 1 << 26
UNBOUNDED = 1 << 40  # the number of workers bounds the queue

Lines = Iterator[tuple[int, bytes]]


def run_batch(path: Path, output: OutputFile, models: Mapping[str, str], options: Mapping[str, Any]) -> int:
    """Answer what the output lacks; return the exit status."""
    raise_limit()
    total = _count(path)
    config = ServerConfig(max_queued_requests=UNBOUNDED, max_queued_tokens=UNBOUNDED)
    num_workers = 2 * (EngineConfig.from_options(**options).max_num_seqs or GPU_SEQS)
    with (
        private_folder() as folder,
        _read_lines(path) as lines,
        counting_bar(sys.stderr.isatty(), total, "requests") as count,
    ):
        catalog = make_catalog(models, options, config, KeyRing(), folder)
        batch = BatchRun(lines, output, catalog, Server(config, catalog, Metrics()), count)
        return asyncio.run(batch.main(min(num_workers, max(1, total))))


class BatchRun:
    def __init__(
        self, lines: Lines, output: OutputFile, catalog: Catalog, server: Server, count: Callable[[int], object]
    ) -> None:
        self._iterate_lines, self._output, self._catalog, self._server, self._count = (
            lines,
            output,
            catalog,
            server,
            count,
        )
        self._client = LocalClient(make_app(server, KeyRing()))
        self._seen: set[str] = set()
        self._starting: asyncio.Future[None] | None = None

    async def main(self, num_workers: int) -> int:
        work = asyncio.ensure_future(self._work(num_workers))
        loop = asyncio.get_running_loop()
        for number in (*STOPPING, RELOADING):
            if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup
                loop.add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            return INTERRUPTED
        finally:
            await self._server.close()
        return 1 if self._output.num_failed else 0

    async def _work(self, num_workers: int) -> None:
        workers = [asyncio.ensure_future(self._answer_lines()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer_lines(self) -> None:
        for number, line in self._iterate_lines:
            result = await self._answer(number, line)
            if result is not None:
                self._output.append(result)
            self._count(1)

    async def _answer(self, number: int, line: bytes) -> dict[str, Any] | None:
        """Return the result to write; None if it is already written."""
        try:
            entry = parse_entry(line)
            if entry.custom_id in self._seen:
                raise BadEntry(
                    "duplicate_custom_id",
                    f"another line before has custom_id={entry.custom_id!r}: give every line its own",
                    entry.custom_id,
                )
        except BadEntry as bad:
            return None if number in self._output.bad_lines else make_error_result(bad, number)
        self._seen.add(entry.custom_id)
        return None if entry.custom_id in self._output.done else await self._ask(entry)

    async def _ask(self, entry: BatchEntry) -> dict[str, Any]:
        """Post a request; the first one loads the model."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._catalog.start())
        await asyncio.shield(self._starting)
        try:
            status, body = await self._client.post(entry.url, entry.body)
        except Exception as error:
            known = to_api_error(error)
            status, body = known.status, msgspec.json.encode(known.body())
        failures = [model.engine.failure for model in self._catalog if model.engine and model.engine.failure]
        if status >= 500 and failures:
            raise EngineFailed(f"{failures[0]}; what was answered is in {self._output.path}")
        return make_result(entry, status, body)


@contextlib.contextmanager
def _read_lines(path: Path) -> Iterator[Lines]:
    """Yield the lines that are not blank, with their numbers."""
    with _open(path) as file:
        yield ((number, line) for number, line in enumerate(_iterate_lines(file, path), start=1) if line.strip())


def _count(path: Path) -> int:
    with _open(path) as file:
        return sum(1 for line in _iterate_lines(file, path) if line.strip())


def _iterate_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"{path} has a line of more than {MAX_LINE_BYTES} bytes: give one request per line")
        yield line


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
