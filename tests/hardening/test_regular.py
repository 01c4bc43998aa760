"""Files that a user names: whatever is no small regular file is refused at once, without being read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.host.files import MIB, UnreadableFile, read_regular


def refusal(path: str | Path, max_bytes: int = 100) -> str:
    with pytest.raises(UnreadableFile) as caught:
        read_regular(path, max_bytes)
    return str(caught.value)


def test_small_files_and_links_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link", 100) == b"x" * 100
    assert read_regular("/proc/self/comm", 100)  # the system says that it has no bytes


def test_what_waits_or_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert "No such device" in refusal(tmp_path / "socket") or "socket" in refusal(tmp_path / "socket")
    assert "a pipe, not a regular file" in refusal(tmp_path / "pipe")
    for device in ("/dev/zero", "/dev/urandom", "/dev/null"):
        assert "a device, not a regular file" in refusal(device)
    assert "Is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "missing")
    assert "null byte" in refusal("a\0b")
    assert "too long" in refusal("x" * 5000)


def test_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert "larger than 4 MiB" in refusal(tmp_path / "sparse", 4 * MIB)
    (tmp_path / "a").write_bytes(b"x" * 101)
    assert "larger than 100 bytes" in refusal(tmp_path / "a")
    assert "larger than 3 bytes" in refusal("/proc/self/status", 3)
