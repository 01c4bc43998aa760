"""Standard streams that are closed, full, or in another encoding: an answer or a sentence, never an abort."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.hardening.commands import HANG_S, TINY, penstock, run_tiny, sentence
from tests.server.running import free_port, wait_ready

PROMPT = "größer als 5 €?"
PLAIN = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.mark.parametrize(
    "closed", [(0, 1, 2), pytest.param((0,), marks=pytest.mark.slow), pytest.param((1, 2), marks=pytest.mark.slow)]
)
def test_a_server_with_closed_streams(tiny_model: Path, closed: tuple[int, ...]) -> None:
    """A socket that took a closed stream's number would get the log, or be handed to the engine as its own."""

    def close() -> None:
        for number in closed:
            os.close(number)

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", str(tiny_model), *TINY, "--port", str(port)],
        stderr=subprocess.DEVNULL,
        preexec_fn=close,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
            wait_ready(process, client)
            assert client.post("/v1/completions", json={"prompt": [20], "max_tokens": 4}).status_code == 200
            links = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in closed]
            assert links == ["/dev/null"] * len(closed)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,), (2,)])
def test_commands_with_closed_streams(closed: tuple[int, ...]) -> None:
    done = penstock("--help", closed=closed)
    assert done.returncode == 0 and not done.stderr
    assert penstock("run", "--nonsense", closed=closed).returncode == 2


def test_no_prompt_on_a_closed_stream(tiny_model: Path) -> None:
    assert "the prompt is empty" in sentence(run_tiny(tiny_model, closed=(0,)))


@pytest.mark.slow
def test_a_full_or_wrong_output(tiny_model: Path, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, open(os.devnull, "rb") as unwritable:
        assert "No space left on device: free some" in sentence(run_tiny(tiny_model, "hi", stdout=full.fileno()))
        assert "redirections" in sentence(penstock("--help", stdout=unwritable.fileno()))
        done = penstock("run", "--nonsense", stderr=full.fileno(), stdout=full.fileno())
        assert done.returncode == 2
        assert run_tiny(tiny_model, "hi", stderr=full.fileno()).returncode == 0
    with open(tmp_path / "out", "wb") as file:
        done = run_tiny(tiny_model, "hi", stdout=file.fileno(), limits={resource.RLIMIT_FSIZE: 0})
        assert "ulimit -f unlimited" in sentence(done)


def test_output_that_nobody_reads_any_more(tiny_model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_tiny(tiny_model, "hi", stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 141 and not done.stderr


@pytest.fixture(scope="module")
def answer(tiny_model: Path) -> str:
    """To PROMPT, in a locale that can write it."""
    text: str = json.loads(run_tiny(tiny_model, PROMPT, "--json").stdout)["text"]
    assert not text.isascii()
    return text


@pytest.mark.parametrize(
    ("env", "encoding"),
    [
        ({"LC_ALL": "C"}, "utf-8"),
        pytest.param(PLAIN, "utf-8", marks=pytest.mark.slow),
        pytest.param({**PLAIN, "PYTHONIOENCODING": "ascii:strict"}, "ascii", marks=pytest.mark.slow),
        pytest.param({"PYTHONIOENCODING": "latin-1"}, "latin-1", marks=pytest.mark.slow),
    ],
    ids=["C", "plain C", "ascii", "latin-1"],
)
def test_encodings(tiny_model: Path, answer: str, env: dict[str, str], encoding: str) -> None:
    """The same answer whatever the locale: UTF-8 where it says nothing, escapes where ASCII was asked for."""
    done = run_tiny(tiny_model, PROMPT, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip(b"\n") == answer.rstrip("\n").encode(encoding, "backslashreplace")


def test_piped_text_and_json_in_ascii(tiny_model: Path, answer: str) -> None:
    done = run_tiny(tiny_model, "--json", env={**PLAIN, "PYTHONIOENCODING": "ascii"}, stdin=PROMPT.encode())
    assert json.loads(done.stdout.decode("ascii"))["text"] == answer


def test_input_that_is_no_text(tiny_model: Path) -> None:
    assert "standard input is not UTF-8 text: byte 1 is 0xe9; convert it" in sentence(
        run_tiny(tiny_model, stdin=b"h\xe9llo", env={"LC_ALL": "C"})
    )
    assert "the prompt is not UTF-8 text" in sentence(run_tiny(tiny_model, os.fsdecode(b"h\xe9llo"), env=PLAIN))
    assert "the system message is not UTF-8 text" in sentence(
        run_tiny(tiny_model, "hi", "--system", os.fsdecode(b"\xff"))
    )
    done = penstock("chat", str(tiny_model), *TINY, stdin=b"h\xe9llo\n")
    assert "not UTF-8" in sentence(done)


def test_input_that_never_ends(tiny_model: Path) -> None:
    with open("/dev/zero", "rb") as zeros:
        process = subprocess.run(
            [sys.executable, "-m", "penstock", "run", str(tiny_model), *TINY],
            stdin=zeros,
            capture_output=True,
            timeout=HANG_S,
        )
    assert "33554432 characters" in sentence(process)
