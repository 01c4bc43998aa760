"""An engine in a process of its own, spoken to in JSON lines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from bench.engines import Engine, Places

ROOT = Path(__file__).parent.parent
LOG_LINES = 6


class EngineFailed(Exception):
    """An engine could not do what it was asked; the rest of the run goes on without it."""


class Process:
    def __init__(self, engine: Engine, places: Places, cpu: str, threads: int, log: Path) -> None:
        self.engine = engine
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(places.python(engine)), "-m", engine.module],
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=places.variables(engine, cpu, threads),
            )

    def do(self, do: str, **values: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(f"the process ended with status {self.process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise EngineFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-LOG_LINES:])

    def close(self) -> None:
        try:
            self.process.communicate('{"do": "close"}\n', timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
