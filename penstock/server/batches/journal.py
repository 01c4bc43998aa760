"""The answers of a batch so far: two files that grow line by line, and become files of its tenant in the end."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from penstock.server.batch.output import Output
from penstock.server.batches.state import BatchState
from penstock.server.files.durable import remove
from penstock.server.files.store import MAX_AGE_S, FileStore, new_file_id

ANSWERS, ERRORS = ".answers", ".errors"
PURPOSE = "batch_output"


class Journal:
    """Every method waits for the disk. Its bytes are reserved like those of files."""

    def __init__(self, folder: Path, state: BatchState, files: FileStore) -> None:
        self._state, self._files = state, files
        self._lock, self._is_open = threading.Lock(), True
        self._paths = {suffix: folder / (state.id + suffix) for suffix in (ANSWERS, ERRORS)}
        self._outputs = {suffix: Output(path) for suffix, path in self._paths.items()}
        for path in self._paths.values():
            os.chmod(path, 0o600)
            files.reserve(state.tenant, path.stat().st_size, is_bounded=False)
        self._count()

    def __contains__(self, custom_id: object) -> bool:
        return any(custom_id in output.done for output in self._outputs.values())

    def append(self, result: dict[str, Any]) -> None:
        """Write one line, unless it is closed; ApiError where the tenant has no room for it."""
        answered = result["response"] is not None and result["response"]["status_code"] < 400
        output = self._outputs[ANSWERS if answered else ERRORS]
        num_bytes = len(msgspec.json.encode(result)) + 1
        with self._lock:
            if self._is_open:
                self._files.reserve(self._state.tenant, num_bytes)
                output.append(result)
                self._count()

    def _count(self) -> None:
        self._state.num_completed = self._outputs[ANSWERS].num_lines
        self._state.num_failed = self._outputs[ERRORS].num_lines

    def name_files(self) -> None:
        """Give ids to the files that will be; done before `publish`, and written down, so that it may be repeated."""
        state = self._state
        if self._outputs[ANSWERS].num_lines:
            state.output_file_id = state.output_file_id or new_file_id()
        if self._outputs[ERRORS].num_lines:
            state.error_file_id = state.error_file_id or new_file_id()

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            for output in self._outputs.values():
                output.__exit__(None, None, None)


def publish(folder: Path, state: BatchState, files: FileStore, *, is_reserved: bool) -> None:
    """Make a closed journal's files those of the tenant (waits for the disk); goes on where a killed server stopped.
    `is_reserved` says that this server has written them, or read them back."""
    for suffix, id, name in ((ANSWERS, state.output_file_id, "output"), (ERRORS, state.error_file_id, "error")):
        path = folder / (state.id + suffix)
        if id is None:
            remove(path)
            continue
        target = files.path_of(id)
        if path.is_file():
            os.replace(path, target)
        if target.is_file() and not files.has(id):
            num_bytes = target.stat().st_size
            if not is_reserved:
                files.reserve(state.tenant, num_bytes, is_bounded=False)
            files.add(
                files.make(
                    id=id,
                    tenant=state.tenant,
                    filename=f"{state.id}_{name}.jsonl",
                    purpose=PURPOSE,
                    num_bytes=num_bytes,
                    lifetime_s=state.output_lifetime_s or MAX_AGE_S,
                )
            )
