"""A point in the device's work."""

from __future__ import annotations

import torch


def now(timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event
