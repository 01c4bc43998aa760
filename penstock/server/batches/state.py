"""A batch as it is kept on disk and told."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.server.context import new_id

ID = "batch_"
VALIDATING, IN_PROGRESS, FINALIZING, COMPLETED = "validating", "in_progress", "finalizing", "completed"
FAILED, EXPIRED, CANCELLING, CANCELLED = "failed", "expired", "cancelling", "cancelled"
ENDS = (COMPLETED, FAILED, EXPIRED, CANCELLED)
TIMED = (IN_PROGRESS, FINALIZING, *ENDS, CANCELLING)


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a batch's input; `line` counts from 1."""

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
    num_completed: int = 0  # as of when it was last written down
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
