"""Models on this machine: files under PENSTOCK_HOME/models and a record of each one's source.

A model is present only if its record names every file with its size. The record is written last, so an interrupted
download is never found.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.host.gguf_parts import first_parts, model_files, parse_part
from penstock.hub.names import SHORT_NAMES


def home() -> Path:
    """Return the folder for downloads."""
    return Path(os.environ.get("PENSTOCK_HOME") or "~/.cache/penstock").expanduser()


@dataclass(frozen=True)
class StoredModel:
    """One model on disk. `source` is empty for a file that the user put there."""

    name: str
    source: str
    path: Path
    num_bytes: int
    modified_s: float

    @property
    def format(self) -> str:
        is_file = self.path.suffix.lower() == ".gguf"
        return "gguf" if is_file or not (self.path / "config.json").exists() else "safetensors"

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the file; the .gguf suffix is optional."""
        if self.format != "gguf":
            return (self.path.name,)
        part = parse_part(self.path.name)
        return (self.path.name, self.path.stem, *((part.whole, part.base) if part else ()))


def display_name(source: str) -> str:
    return next((short for short, name in SHORT_NAMES.items() if name == source), source)


class Store:
    """Model files and their records under one root."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or home() / "models"
        self._records = self.root / ".sources"
        self._partial = self.root / ".partial"

    def find(self, source: str) -> Path | None:
        """Return the complete model fetched from `source`, or None."""
        record = self._read(self._record_path(source))
        return self._complete_path(record) if record else None

    def find_file(self, name: str) -> Path | None:
        """Return a model by the name of its file or folder. A short name never means a file."""
        if name in SHORT_NAMES:
            return None
        matches = {model.path for model in self.models() if name in model.file_names}
        return matches.pop() if len(matches) == 1 else None

    def models(self) -> list[StoredModel]:
        recorded = [(record["source"], path) for record in self.records() if (path := self._complete_path(record))]
        known = {path for _, path in recorded}
        models = [_make_model(display_name(source), source, path) for source, path in recorded]
        if self.root.is_dir():
            models += [
                _make_model(path.name, "", path)
                for path in self.root.iterdir()
                if path not in known and _is_model(path) and first_parts([path.name])
            ]
        return sorted(models, key=lambda model: model.name.lower())

    def records(self) -> list[dict[str, Any]]:
        if not self._records.is_dir():
            return []
        return [record for path in self._records.glob("*.json") if (record := self._read(path))]

    @contextmanager
    def lock(self, source: str, announce_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Let one process at a time fetch or remove a model; the lock dies with its holder."""
        import fcntl

        self._records.mkdir(parents=True, exist_ok=True)
        with open(self._record_path(source).with_suffix(".lock"), "a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if announce_wait:
                    announce_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def workspace(self, source: str) -> Iterator[Path]:
        """Yield an empty folder on the store's file system. Hold the lock: leftovers of dead processes are cleared
        here."""
        self._partial.mkdir(parents=True, exist_ok=True)
        prefix = _file_name(source) + "~"
        for leftover in self._partial.glob(glob.escape(prefix) + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._partial))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def place(self, built: Path, source: str, details: dict[str, Any]) -> Path:
        """Move a finished file or folder into the store and record it."""
        target = self._target(built, source)
        _flush(built)
        if target.is_dir():
            os.rename(target, built.with_name(built.name + ".old"))
        os.replace(built, target)
        return self.record(source, target, details)

    def record(self, source: str, path: Path, details: dict[str, Any]) -> Path:
        """Record that `path` is the complete model of `source`. Relative paths are inside the store."""
        inside = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        record = {"source": source, "path": str(inside), "files": _sizes(path), **details}
        self._records.mkdir(parents=True, exist_ok=True)
        target = self._record_path(source)
        handle, temporary = tempfile.mkstemp(dir=self._records, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    def remove(self, model: StoredModel) -> None:
        """Delete records first: an interrupted removal may leave a file without a record, never the reverse."""
        with self.lock(model.source or model.name), self.workspace(model.source or model.name) as workspace:
            for record in self.records():
                if self._path(record) == model.path:
                    self._record_path(record["source"]).unlink(missing_ok=True)
            if model.path.is_relative_to(self.root) and model.path.exists():
                for path in [model.path] if model.path.is_dir() else model_files(model.path):
                    os.rename(path, workspace / path.name)
                if model.path.parent != self.root and not any(model.path.parent.iterdir()):
                    model.path.parent.rmdir()

    def _target(self, built: Path, source: str) -> Path:
        """Return the target path; a name already taken gets a folder of its own."""
        target = self.root / built.name
        owners = {record["source"] for record in self.records() if self._path(record) == target}
        if not target.exists() or owners == {source} or (not owners and _same(built, target)):
            return target
        folder = self.root / _file_name(source)
        folder.mkdir(exist_ok=True)
        return folder / built.name

    def _record_path(self, source: str) -> Path:
        return self._records / (_file_name(source) + ".json")

    def _path(self, record: dict[str, Any]) -> Path:
        return self.root / str(record["path"])

    def _complete_path(self, record: dict[str, Any]) -> Path | None:
        path = self._path(record)
        base = path if path.is_dir() else path.parent
        try:
            whole = all((base / name).stat().st_size == size for name, size in record["files"].items())
        except OSError:
            return None
        return path if whole and path.exists() else None

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        whole = isinstance(record, dict) and {"source", "path", "files"} <= record.keys()
        return record if whole and isinstance(record["files"], dict) and record["files"] else None


def _file_name(source: str) -> str:
    return quote(source, safe="").replace("%", "=")


def _is_model(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.is_file():
        return path.suffix.lower() == ".gguf"
    return (path / "config.json").is_file() or len(first_parts(file.name for file in path.glob("*.gguf"))) == 1


def _sizes(path: Path) -> dict[str, int]:
    if path.is_file():
        return {file.name: file.stat().st_size for file in model_files(path)}
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}


def _same(path: Path, other: Path) -> bool:
    if path.is_file() and other.is_file():
        import filecmp

        return filecmp.cmp(path, other, shallow=False)
    return path.is_dir() and other.is_dir() and _sizes(path) == _sizes(other)


def _make_model(name: str, source: str, path: Path) -> StoredModel:
    return StoredModel(name, source, path, sum(_sizes(path).values()), path.stat().st_mtime)


def _flush(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    now = time.time()
    os.utime(path, (now, now))
