"""Tests here share `convert` and `seeds`, which the fuzz command also imports from this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
