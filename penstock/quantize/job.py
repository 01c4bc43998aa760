"""Keep what a run has finished beside its output, so that a killed one goes on where it stopped.

The folder `OUT.unfinished` holds `job.json`, a safetensors file of finished tensors for each part of the model, and the
inputs of the next block. None of it has a name or a config that a loader takes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.files.write_safetensors import write_safetensors

SUFFIX = ".unfinished"


class Job:
    """The folder of an unfinished run."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        """Open or make the folder. `facts` say what is made of what; another run's folder is refused."""
        self.out, self.facts = out, facts
        self.folder = out.parent / (out.name + SUFFIX)

    @contextmanager
    def open(self) -> Iterator[Job]:
        if self.out.exists() or self.out.is_symlink():
            raise InvalidConfig(f"{self.out} exists: remove it, or name another place for the output")
        try:
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise InvalidConfig(
                f"{self.folder} cannot be written ({error.strerror}): name an output in a folder that you may write to"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidConfig(f"{self.out} is being made by another run: wait for it, or name another") from None
            self._check()
            yield self

    def _check(self) -> None:
        path = self.folder / "job.json"
        if not path.exists():
            _write_text(path, json.dumps(self.facts, indent=1))
            return
        try:
            before = json.loads(path.read_text())
        except ValueError:
            before = {}
        for name, value in self.facts.items():
            if before.get(name) != value:
                raise InvalidConfig(
                    f"{self.folder} is of a run with {name}={before.get(name)!r}, not {value!r}: repeat that run to "
                    "finish it, or remove the folder"
                )

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.tensors"

    def _inputs(self, number: int) -> Path:
        return self.folder / f"inputs-{number:05}.tensors"

    def count_finished(self, total: int) -> int:
        """Count the parts that are complete, and whose successor's inputs are there."""
        count = 0
        while count < total and self.part(count).exists():
            count += 1
        while count and count < total and not self._inputs(count).exists():
            count -= 1
        return count

    def finish(self, number: int, tensors: dict[str, Tensor], facts: dict[str, Any], x: Tensor | None) -> None:
        """Keep part `number`, facts about it, and the inputs of the next one."""
        write_safetensors(
            self._inputs(number + 1), {} if x is None else {"x": x}, {"has": "x" if x is not None else ""}
        )
        write_safetensors(self.part(number), tensors, {"facts": json.dumps(facts)})
        self._inputs(number).unlink(missing_ok=True)

    def inputs(self, number: int) -> Tensor | None:
        """Read the inputs of a part; None where the run has none."""
        with self._open(self._inputs(number)) as file:
            x: Tensor | None = file.get_tensor("x") if file.metadata()["has"] else None
            return x

    def read(self, number: int) -> Any:
        """Open the tensors of a finished part."""
        return self._open(self.part(number))

    def _open(self, path: Path) -> Any:
        from safetensors import safe_open

        try:
            return safe_open(path, framework="pt")
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise InvalidModel(f"{path} is damaged ({reason}): remove {self.folder} and start anew") from None

    def part_facts(self, number: int) -> dict[str, Any]:
        with self.read(number) as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            return facts

    def publish(self, made: Path) -> None:
        """Give the finished folder or file its name, and remove what led to it."""
        made.rename(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
