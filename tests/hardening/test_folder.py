"""The folder of the engines' sockets: nobody else clears it, and it is found a place that is short enough."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock.errors import InvalidConfig
from penstock.server.engines import process as module
from penstock.server.engines.process import FOLDER, MAX_SOCKET_PATH, private_folder
from tests.hardening.commands import HANG_S, TINY
from tests.server.running import RunningServer

MAKE = (
    "import sys; from penstock.server.engines.process import private_folder as make\n"
    "with make() as f: print(f, flush=True); "
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that is looked at."""
    monkeypatch.setattr(module, "_list_places", lambda: [str(tmp_path)])
    monkeypatch.setattr(module, "MAX_SOCKET_PATH", 4096)  # pytest's folders are deep
    return tmp_path


def test_one_in_use_stays_and_one_left_is_cleared(place: Path) -> None:
    """As a server in another pid namespace would: whose process has which number says nothing."""
    left = place / f"{FOLDER}left"
    left.mkdir()
    (left / "1.engine").touch()
    (place / "penstock-1-else").mkdir()  # not of this kind
    with private_folder() as one:
        assert not left.exists() and stat.S_IMODE(one.stat().st_mode) == 0o700
        with private_folder() as two:
            assert one.is_dir() and two.is_dir() and one != two
        assert one.is_dir() and not two.exists()
    assert [path.name for path in place.iterdir()] == ["penstock-1-else"]


def test_a_killed_process_lets_go_of_its_folder(tmp_path: Path) -> None:
    base = Path("/tmp") if len(str(tmp_path)) > 60 else tmp_path
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(base)},
        text=True,
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    done = subprocess.run([sys.executable, "-c", MAKE], env={**os.environ, "TMPDIR": str(base)}, timeout=HANG_S)
    assert done.returncode == 0 and left.is_dir()
    process.kill()
    process.communicate()
    subprocess.run([sys.executable, "-c", MAKE], env={**os.environ, "TMPDIR": str(base)}, timeout=HANG_S, check=True)
    assert not left.exists()


def test_links_are_not_followed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    precious = tmp_path_factory.mktemp("precious")
    (precious / "file").touch()
    (place / f"{FOLDER}link").symlink_to(precious)
    with private_folder():
        assert (precious / "file").exists()


@pytest.mark.parametrize("length", [103, pytest.param(60, marks=pytest.mark.slow)])
def test_a_long_tmpdir(tiny_model: Path, length: int) -> None:
    place = Path("/tmp/" + f"p{os.getpid()}-".ljust(length - 5, "x"))
    place.mkdir()
    try:
        with RunningServer(str(tiny_model), *TINY, env={"TMPDIR": str(place)}) as running:
            answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": [20], "max_tokens": 4}, timeout=HANG_S)
            assert answer.status_code == 200
            assert len(list(place.iterdir())) == (1 if length == 60 else 0)
    finally:
        place.rmdir()


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or unwritable TMPDIR is passed over; where nothing is left, a sentence names each and the remedy."""
    monkeypatch.setenv("TMPDIR", "/proc/nothing")
    with private_folder() as folder:
        assert len(f"{folder}/999999.engine") <= MAX_SOCKET_PATH
    monkeypatch.setattr(module, "_list_places", lambda: ["/proc/nothing", "/tmp/" + "x" * 103])
    with pytest.raises(InvalidConfig, match=r"/proc/nothing: No such file.*x is too long.*TMPDIR"), private_folder():
        pass
