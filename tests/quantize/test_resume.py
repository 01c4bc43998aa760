"""Runs that end early: what they leave, and what the next one makes of it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.files import open_checkpoint
from penstock.quantize.run import quantize
from penstock.quantize.targets import make_target
from tests.quantize.conftest import write_folder

RUN = """
import sys, time
from pathlib import Path
from penstock.models.files import open_checkpoint
from penstock.quantize.run import quantize
from penstock.quantize.targets import make_target

def wait(done, total):
    if done == 3:
        print("three", flush=True)
        time.sleep(60)

tokens = [int(each) for each in sys.argv[3].split(",")]
source, out = map(Path, sys.argv[1:3])
quantize(open_checkpoint(source), out, make_target("int4", "gptq", None), tokens, progress=wait)
"""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("deep") / "tiny", num_hidden_layers=5)


def run(source: Path, out: Path, tokens: list[int], scheme: str = "int4", **more: object) -> list[int]:
    """Return the blocks that were done in turn."""
    done: list[int] = []
    target = make_target(scheme, None, None)
    quantize(open_checkpoint(source), out, target, tokens, progress=lambda now, _: done.append(now), **more)  # type: ignore[arg-type]
    return done


def test_a_killed_run_goes_on_after_its_last_block(deep: Path, tokens: list[int], tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    given = ",".join(map(str, tokens))
    command = [sys.executable, "-c", RUN, str(deep), str(out), given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "three\n"
        with pytest.raises(InvalidConfig, match="is being made by another run"):
            run(deep, out, tokens)
        os.kill(child.pid, signal.SIGKILL)
    assert not out.exists()
    for path in (tmp_path / "out.unfinished", *(tmp_path / "out.unfinished").iterdir()):
        with pytest.raises(InvalidModel):
            open_checkpoint(path)
    with pytest.raises(InvalidConfig, match="is of a run with scheme='int4', not 'int8': repeat that run"):
        run(deep, out, tokens, "int8")
    with pytest.raises(InvalidConfig, match="is of a run with calibration="):
        run(deep, out, tokens[:300])
    assert run(deep, out, tokens) == [3, 4, 5]
    assert not (tmp_path / "out.unfinished").exists()
    assert run(deep, whole, tokens) == [0, 1, 2, 3, 4, 5]
    resumed, straight = (load_file(folder / "model.safetensors") for folder in (out, whole))
    assert resumed.keys() == straight.keys()
    assert all(bool((resumed[name] == straight[name]).all()) for name in straight)


@pytest.mark.parametrize("name", ["part-00002.tensors", "inputs-00003.tensors"])
def test_a_damaged_part_is_named(deep: Path, tokens: list[int], tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(open_checkpoint(deep), out, make_target("int4", None, None), tokens, progress=stop)
    part = tmp_path / "out.unfinished" / name
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(InvalidModel, match="is damaged.*remove .*out.unfinished and start anew"):
        run(deep, out, tokens)


def test_a_full_disk_ends_a_run_with_one_line(deep: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the same kind of error from the same call."""
    command = [sys.executable, "-m", "penstock", "quantize", str(deep), str(tmp_path / "out"), "--scheme", "bf16"]
    limited = f"ulimit -f 40; trap '' XFSZ; exec {shlex.join(command)} --calibration none"
    begun = time.monotonic()
    ended = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and time.monotonic() - begun < 300
    assert ended.stderr.count("\n") == 1 and "File too large" in ended.stderr, ended.stderr
    assert not (tmp_path / "out").exists()
