from __future__ import annotations

from tests.ops.conftest import path

__all__ = ["path"]
