"""Made-up samples of requests."""

from __future__ import annotations

from typing import Any

from bench.load.stream import Sample


def made(begin_s: float, first_s: float, last_s: float, num_output: int = 11, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "index": 0,
        "begin_s": begin_s,
        "late_s": 0.0,
        "outcome": "ok",
        "num_asked": num_output,
        "status": 200,
        "num_output": num_output,
        "first_s": first_s,
        "last_s": last_s,
    }
    return Sample(**values | changes)
