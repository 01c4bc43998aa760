"""Tell model files and processors apart without reading all of a model."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from pathlib import Path

NUM_SAMPLES = 64  # of a file
SAMPLE_BYTES = 4096
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


def find_cpu_features() -> tuple[str, ...]:
    """List what kernels choose their instructions by: the last bits of sums may depend on it."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    return (platform.machine(), *(one for one in FEATURES if one in flags))
