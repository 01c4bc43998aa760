"""Memory that large bodies took goes back to the system, where the C library is glibc."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE_BYTES = 1 << 20

_library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def keep_large_apart() -> None:
    """Map every large allocation by itself: glibc stops doing so once one was freed, and then keeps what it has."""
    if hasattr(_library, "mallopt"):
        _library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Return free memory to the system; other threads run meanwhile."""
    if hasattr(_library, "malloc_trim"):
        _library.malloc_trim(0)
