"""The file that a run leaves: what was measured, where, and every sample."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.limits import commit, machine

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent.parent
CLIENT = ("penstock", "tqdm")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def header(kind: str, busy_share: float | None) -> Row:
    return {
        "schema": 1,
        "kind": kind,
        "complete": False,
        "started": now(),
        **commit(ROOT),
        "machine": machine(),
        "versions": _versions(),
        "busy_share": busy_share,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in CLIENT:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
