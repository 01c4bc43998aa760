"""The body of /v1/batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.server.batch.entries import URLS
from penstock.server.fields import Body
from penstock.server.files.routes import MIN_AGE_S
from penstock.server.files.store import DAY_S, MAX_AGE_S
from penstock.server.responses.body import Metadata

WINDOWS_S = {"24h": DAY_S}


class OutputExpiry(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_AGE_S, le=MAX_AGE_S)


class BatchBody(Body):
    input_file_id: str = Field(max_length=128)
    endpoint: Literal[URLS]  # type: ignore[valid-type]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None
