"""Blocks in files: they survive a killed writer, damage, loss and a full folder; two engines share one folder."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import InvalidConfig
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.files import FOLDER, FileTier
from penstock.runner.store.segment import HEADER, NAME_BYTES, SegmentWriter

MIB = 1 << 20


def name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "little")


def block(number: int, size: int = 4096) -> bytes:
    return random.Random(number).randbytes(size)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(str(tmp_path), 16 * MIB)
    yield made
    made.close()


def fill(tier: FileTier, count: int, size: int = 4096) -> None:
    for number in range(count):
        assert tier.put(name(number), block(number, size))
    tier.flush()


def again(tmp_path: Path) -> FileTier:
    return FileTier(str(tmp_path), 16 * MIB)


def test_blocks_outlive_the_process(tier: FileTier, tmp_path: Path) -> None:
    fill(tier, 20)
    later = again(tmp_path)
    assert [later.get(name(number)) for number in range(20)] == [block(number) for number in range(20)]
    assert name(20) not in later and later.get(name(20)) is None
    later.close()


def test_nobody_else_may_read_them(tier: FileTier, tmp_path: Path) -> None:
    fill(tier, 1)
    folder = tmp_path / FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_two_engines_share_a_folder(tier: FileTier, tmp_path: Path) -> None:
    """Each finds what the other wrote, while both write."""
    other = again(tmp_path)
    for number in range(40):
        (tier if number % 2 else other).put(name(number), block(number))
    for one in (tier, other):
        one.flush()
    for one in (tier, other):
        one.refresh()
        assert all(one.get(name(number)) == block(number) for number in range(40))
    other.forget()
    tier.refresh()
    assert name(0) not in tier and name(1) not in other
    tier.put(name(50), block(50))  # its own segment was removed under it
    tier.flush()
    other.refresh()
    assert other.get(name(50)) == block(50)
    other.close()


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    bound = 64 * 4096
    tier = FileTier(str(tmp_path), bound)
    fill(tier, 300)
    tier.close()
    total = sum(file.stat().st_size for file in (tmp_path / FOLDER).iterdir())
    later = FileTier(str(tmp_path), bound)
    assert total <= bound and name(299) in later and name(0) not in later and len(later) > 30
    later.close()


@pytest.mark.parametrize("seed", range(6))
def test_damage_is_a_miss(tmp_path: Path, seed: int) -> None:
    """Bits flipped, segments cut off or deleted, before and while somebody reads: never other bytes than were saved."""
    rng = random.Random(seed)
    first = FileTier(str(tmp_path), 400 * 4096)  # several segments
    fill(first, 60)
    first.close()
    early = again(tmp_path)
    for file in sorted((tmp_path / FOLDER).iterdir()):
        kind = rng.choice(("flip", "flip", "cut", "delete", "zero"))
        data = bytearray(file.read_bytes())
        if kind == "delete":
            file.unlink()
            continue
        if kind == "flip":
            for _ in range(rng.choice((1, 30))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "zero":
            begin = rng.randrange(len(data))
            data[begin : begin + 9000] = bytes(len(data[begin : begin + 9000]))
        file.write_bytes(data if kind != "cut" else data[: rng.randrange(len(data))])
    late = again(tmp_path)
    found = 0
    for tier in (early, late):
        for number in range(60):
            read = tier.get(name(number))
            assert read in (None, block(number))
            assert (name(number) in tier) == (read is not None), "a block that is lost is not offered again"
            found += read is not None
        assert tier.put(name(0), block(0))
        tier.flush()
        assert tier.get(name(0)) == block(0)
        tier.close()
    assert 0 < found < 120


def test_a_name_of_another_block_is_a_miss(tmp_path: Path) -> None:
    """A header with damage in its name, where the name is that of another block."""
    tier = FileTier(str(tmp_path), MIB)
    fill(tier, 2)
    tier.close()
    [file] = (tmp_path / FOLDER).iterdir()
    data = bytearray(file.read_bytes())
    data[4 : 4 + NAME_BYTES] = name(7)
    file.write_bytes(data)
    later = again(tmp_path)
    assert name(7) in later and later.get(name(7)) is None and name(7) not in later
    assert later.get(name(1)) == block(1)
    later.close()


KILLED = """
import sys, time
from tests.store.test_files import block, name
from penstock.runner.store.files import FileTier
tier = FileTier(sys.argv[1], 64 << 20)
for number in range(100000):
    while not tier.put(name(number), block(number, 100_000)):
        pass
    if number == 20:
        while not len(tier):  # its thread may be late
            time.sleep(0.001)
        print("on", flush=True)
"""


def test_kill_9_in_the_middle_of_writes(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"on\n"
    time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    later = FileTier(str(tmp_path), 64 * MIB)
    found = [number for number in range(len(later) + 1) if name(number) in later]
    assert found and all(later.get(name(number)) == block(number, 100_000) for number in found)
    later.put(name(0), block(0))
    later.close()


def test_a_full_folder_costs_the_saves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tier = FileTier(str(tmp_path), 16 * MIB, clock=lambda: now[0])
    fill(tier, 3)
    write, is_full = os.write, [True]

    def full(file: int, data: memoryview) -> int:
        if is_full[0] and len(data) > HEADER.size:
            write(file, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    tier.put(name(3), block(3))
    tier.flush()
    assert tier.num_errors == 1 and "No space left" in caplog.text
    assert name(3) not in tier and not tier.put(name(4), block(4)), "nothing is tried for a while"
    is_full[0], now[0] = False, 60.0
    assert tier.put(name(4), block(4))
    tier.close()
    later = again(tmp_path)
    assert [later.get(name(number)) for number in (0, 2, 4)] == [block(0), block(2), block(4)]
    later.close()


def test_a_folder_that_cannot_be_written_to_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = again(tmp_path)
    fill(tier, 3)
    tier.close()

    def refuse(self: SegmentWriter, folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(SegmentWriter, "__init__", refuse)
    later = again(tmp_path)
    later.put(name(5), block(5))
    later.flush()
    assert later.get(name(2)) == block(2) and name(5) not in later
    later.close()


def test_a_folder_that_was_removed_is_made_again(tier: FileTier, tmp_path: Path) -> None:
    """And emptying one that is not there ends nothing."""
    fill(tier, 3)
    shutil.rmtree(tmp_path / FOLDER)
    tier.forget()
    assert tier.get(name(1)) is None
    fill(tier, 3)
    later = again(tmp_path)
    assert later.get(name(1)) == block(1) and stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    later.close()


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="kv_offloading_path=.*file.* cannot be used: .*name a folder"):
        FileTier(str(tmp_path / "file"), MIB)


def test_memory_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = BlockStore(10 * 4096)
    for number in range(20):
        store.save(name(number), block(number))
        store.load(name(0))
    assert store.num_bytes == 10 * 4096 and store.has(name(0)) and store.has(name(19)) and not store.has(name(5))
    store.forget()
    assert not store.has(name(0)) and store.num_bytes == 0
    both = BlockStore(4096, again(tmp_path))
    for number in range(5):
        both.save(name(number), block(number))
    assert all(both.load(name(number)) == block(number) for number in range(5))
    assert both.count()["num_store_hits"] == 5 and both.num_bytes == 4096
    both.close()
