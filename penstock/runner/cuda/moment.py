"""A point in the device's work."""

from __future__ import annotations

import torch


def now() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
