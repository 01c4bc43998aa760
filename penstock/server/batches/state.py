"""State of a batch, and the journal that restores it after a restart."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from penstock.server.batch.entries import OutputFile
from penstock.server.files.store import MAX_AGE_S, FileStore, new_file_id, remove_file
from penstock.server.http.context import new_id

ID = "batch_"
VALIDATING, IN_PROGRESS, FINALIZING, COMPLETED = "validating", "in_progress", "finalizing", "completed"
FAILED, EXPIRED, CANCELLING, CANCELLED = "failed", "expired", "cancelling", "cancelled"
ENDS = (COMPLETED, FAILED, EXPIRED, CANCELLED)
TIMED = (IN_PROGRESS, FINALIZING, *ENDS, CANCELLING)
ANSWERS, ERRORS = ".answers", ".errors"
PURPOSE = "batch_output"


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a batch's input; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchState(msgspec.Struct, kw_only=True):
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    id: str = msgspec.field(default_factory=lambda: new_id(ID))
    status: str = VALIDATING
    ending: str = COMPLETED  # the status that follows finalizing
    times: dict[str, int] = {}  # when each status began
    errors: list[LineError] = []
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_lines: int = 0
    num_completed: int = 0  # when last saved
    num_failed: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in ENDS

    def enter(self, status: str, now_s: float) -> None:
        self.status = status
        self.times = {**self.times, status: int(now_s)}

    def as_json(self) -> dict[str, Any]:
        errors = [msgspec.structs.asdict(error) for error in self.errors]
        has_files = self.has_ended
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if has_files else None,
            "error_file_id": self.error_file_id if has_files else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in TIMED},
            "request_counts": {"total": self.num_lines, "completed": self.num_completed, "failed": self.num_failed},
            "usage": None,
            "metadata": self.metadata,
        }


class Journal:
    """Result files in progress; all methods block on the disk, and bytes are reserved as for files."""

    def __init__(self, folder: Path, state: BatchState, files: FileStore) -> None:
        self._state, self._files = state, files
        self._lock, self._is_open = threading.Lock(), True
        self._paths = {suffix: folder / (state.id + suffix) for suffix in (ANSWERS, ERRORS)}
        self._outputs = {suffix: OutputFile(path) for suffix, path in self._paths.items()}
        for path in self._paths.values():
            os.chmod(path, 0o600)
            files.reserve(state.tenant, path.stat().st_size, is_bounded=False)
        self._count()

    def __contains__(self, custom_id: object) -> bool:
        return any(custom_id in output.done for output in self._outputs.values())

    def append(self, result: dict[str, Any]) -> None:
        """Write one line unless closed; ApiError if the tenant's storage is full."""
        is_answered = result["response"] is not None and result["response"]["status_code"] < 400
        output = self._outputs[ANSWERS if is_answered else ERRORS]
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
        """Assign file ids; saved before `publish`, so that it can be repeated."""
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
    """Turn a closed journal into the tenant's files (blocks on the disk); resumes after a crash.

    `is_reserved` is True if this server already counts their bytes.
    """
    for suffix, id, name in ((ANSWERS, state.output_file_id, "output"), (ERRORS, state.error_file_id, "error")):
        path = folder / (state.id + suffix)
        if id is None:
            remove_file(path)
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
