"""Commands as a shell runs them, under limits and with streams that a careless operator leaves behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TINY = ("--load-format", "dummy", "--threads", "1")
HANG_S = 120.0  # nothing here takes longer but by hanging


def penstock(
    *arguments: str,
    limits: dict[int, int] | None = None,
    closed: Sequence[int] = (),
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end. `limits` are hard ones; `closed` are standard streams."""

    def prepare() -> None:
        for kind, most in (limits or {}).items():
            resource.setrlimit(kind, (most, most))
        for number in closed:
            os.close(number)

    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(env or {})},
        preexec_fn=prepare,
    )
    try:
        out, err = process.communicate(stdin, timeout=HANG_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out or b"", err or b"")


def sentence(done: subprocess.CompletedProcess[bytes]) -> str:
    """The one line of an error; fails where there is a traceback, an abort or none."""
    text = done.stderr.decode()
    assert done.returncode in (1, 2), (done.returncode, text)
    assert text.startswith("error: ") and text.count("\n") == 1, text
    return text


def run_tiny(model: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return penstock("run", str(model), *TINY, "--max-tokens", "8", "--seed", "1", *arguments, **options)  # type: ignore[arg-type]
