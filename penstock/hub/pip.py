"""Fetch one wheel with the running interpreter's pip, so that the user's index, mirror and proxy settings hold."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from penstock.hub.failure import pip_failed
from penstock.hub.progress import ByteBar

# pip ends with us even when we are killed: its standard input is a pipe that only we hold open.
_BOOT = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.path[:] = [entry for entry in sys.path if entry != ""]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
# Wheels only: a source archive would run the package's own code while pip looks at it.
_OPTIONS = (
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--progress-bar=off",
    "--no-input",
    "--disable-pip-version-check",
)
_SIZE = re.compile(r"Downloading \S+\.whl \(([\d.]+) (bytes|kB|MB|GB)\)")
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}


def download_wheel(name: str, requirement: str, folder: Path, label: str, progress: bool) -> Path:
    """The wheel of `requirement`, in `folder`. `name` is the model, for messages."""
    target, scratch, log = folder / "wheel", folder / "tmp", folder / "pip.log"
    for path in (target, scratch):
        path.mkdir()
    command = [sys.executable, "-c", _BOOT, *_OPTIONS, "--dest", str(target), requirement]
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    with ByteBar(label, progress) as bar, open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
        try:
            code = _watch(process, folder, log, bar)
        finally:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        wheels = list(target.glob("*.whl"))
        if code != 0 or len(wheels) != 1:
            raise pip_failed(name, requirement, folder.parent.parent, log.read_text(errors="replace"))
        bar.finish(wheels[0].stat().st_size)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, log: Path, bar: ByteBar) -> int:
    while True:
        try:
            return process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            bar.update(_largest(folder), _announced(log))


def _largest(folder: Path) -> int:
    """Bytes of the wheel so far: pip writes it under its temporary folder and copies it to the target."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # folders may be gone by the time they are looked into
        for name in names:
            with contextlib.suppress(OSError):
                if name.endswith(".whl"):
                    sizes.append(os.stat(os.path.join(place, name)).st_size)
    return max(sizes)


def _announced(log: Path) -> int | None:
    found = _SIZE.search(log.read_text(errors="replace"))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None
