"""Tell model files and processors apart without reading all of a model."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

NUM_SAMPLES = 64  # of a file
SAMPLE_BYTES = 4096
MAX_PLACES, PLACE_BYTES = 4, 1024  # of a tensor
MAX_READS = 1 << 15  # of a model's tensors: a second or two from a cold disk
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "fma", "f16c")
SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".jinja")


def sample_files(path: Path) -> str:
    """Hash the names, sizes and evenly spaced parts of a model's files."""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else file.suffix}:{size}:{sample_file(file, size)}".encode())
    return digest.hexdigest()


def sample_file(file: Path, size: int, sample_bytes: int = SAMPLE_BYTES) -> str:
    """Hash evenly spaced parts of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as source:
        for start in range(0, size, max(sample_bytes, size // NUM_SAMPLES)):
            source.seek(start)
            digest.update(source.read(sample_bytes))
    return digest.hexdigest()


def sample_spans(spans: Mapping[str, tuple[Path, int, int]]) -> dict[str, str]:
    """Hash a few places of each span (file, begin, end). They follow from its name: equal models are read alike."""
    num_places = max(1, min(MAX_PLACES, MAX_READS // max(1, len(spans))))
    digests, source, opened = {}, None, None
    try:
        for name, (path, begin, end) in sorted(spans.items(), key=lambda one: one[1]):
            if source is None or opened != path:
                if source is not None:
                    source.close()
                source, opened = path.open("rb"), path
            digest = hashlib.blake2b(f"{end - begin}".encode(), digest_size=8)
            for place in _choose_places(name, end - begin, num_places):
                source.seek(begin + place)
                digest.update(source.read(min(PLACE_BYTES, end - begin - place)))
            digests[name] = digest.hexdigest()
    finally:
        if source is not None:
            source.close()
    return digests


def _choose_places(name: str, num_bytes: int, num_places: int) -> list[int]:
    if num_bytes <= num_places * PLACE_BYTES:
        return list(range(0, num_bytes, PLACE_BYTES))
    drawn = hashlib.blake2b(name.encode(), digest_size=8 * MAX_PLACES).digest()
    return [
        int.from_bytes(drawn[8 * number : 8 * number + 8], "little") % (num_bytes - PLACE_BYTES)
        for number in range(num_places)
    ]


def find_cpu_features() -> tuple[str, ...]:
    """List what kernels choose their instructions by: the last bits of sums may depend on it."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    return (platform.machine(), *(one for one in FEATURES if one in flags))
