"""The fixed text that quality is measured on; README.md beside it says what it is."""

from __future__ import annotations

from pathlib import Path

TEXT = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
