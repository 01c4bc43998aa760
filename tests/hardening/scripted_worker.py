"""An engine process without a model, for tests of what the server does with engines: it starts at once, its tokens are
known beforehand, and it fails as told, by its options while loading and by the tokens of a prompt later.

Options: `folder` gets a file per start and the order in which requests were begun; `loads` says how each start goes;
`rows` is how many sequences run at once; `step_s` how long a step takes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from penstock.api.worker import Task
from penstock.engine.ipc import Heartbeat, Wire
from penstock.engine.messages import Abort, Add, Deltas, Failed, Ready, Stop
from penstock.host.parent import read_first_line
from penstock.types import Delta

DEATH, LATE_DEATH, STUMBLE, HANG, MUTE = 310, 311, 312, 313, 314  # tokens of a prompt
LATE = 20  # tokens after which LATE_DEATH kills, whichever engine made them
FEW = 3  # tokens that STUMBLE makes in every engine before it kills


def token_at(seed: int, sibling: int, position: int) -> int:
    return (seed * 7919 + sibling * 104729 + position * 31) % 300


class Sequence:
    def __init__(self, command: Add, sibling: int, tokens: list[int]) -> None:
        self.request, self.sibling = command.request, sibling
        self.num_before = self.num_tokens = len(tokens)
        expected = [token_at(self.request.seed, sibling, position) for position in range(len(tokens))]
        assert tokens == expected, "a sequence goes on with other tokens than it had"

    def step(self) -> Delta | None:
        asked = set(self.request.tokens)
        if (
            DEATH in asked
            or LATE_DEATH in asked
            and self.num_tokens >= LATE
            or (STUMBLE in asked and self.num_tokens - self.num_before >= FEW)
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in asked:
            time.sleep(3600)
        if MUTE in asked:
            return None
        token = token_at(self.request.seed, self.sibling, self.num_tokens)
        self.num_tokens += 1
        ends = self.num_tokens >= self.request.max_tokens
        return Delta(self.request.id, self.sibling, (token,), finish_reason="length" if ends else None)


def load(wire: Wire, options: dict[str, object], folder: Path) -> None:
    number = len(list(folder.glob("start-*")))
    (folder / f"start-{number}").write_text(str(os.getpid()))
    loads = list(options.get("loads") or [])  # type: ignore[call-overload]
    how = loads[number] if number < len(loads) else "ok"
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "failed":
        wire.send(Failed("the model cannot be read"))
        wire.close()
        sys.exit(1)
    if how == "slow":
        time.sleep(2.5)


def main() -> None:
    task = msgspec.json.decode(read_first_line(), type=Task)
    options, folder = task.options, Path(task.options["folder"])
    wire, heartbeat = Wire(task.endpoint), Heartbeat(task.beat_endpoint)
    heartbeat.start()
    load(wire, options, folder)
    rows = int(options.get("rows", 4))
    wire.send(Ready([], {}, 320, 8, 4096, 4096, rows, 0, 0, False, "none", "Scripted", 0.0))
    heartbeat.tell(lambda: {"num_running": 0.0})
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    with open(folder / "begun", "a", buffering=1) as begun:
        while True:
            for command in wire.receive(None if not waiting and not running else 0.0):
                if isinstance(command, Stop):
                    return
                if isinstance(command, Add):
                    begun.write(f"{command.request.id} {command.request.priority}\n")
                    outputs = command.outputs or {at: [] for at in range(command.request.num_siblings)}
                    waiting += [Sequence(command, at, tokens) for at, tokens in outputs.items()]
                elif isinstance(command, Abort):
                    for queue in (waiting, running):
                        queue[:] = [
                            one
                            for one in queue
                            if one.request.id != command.id or command.sibling not in (None, one.sibling)
                        ]
            while waiting and len(running) < rows:
                running.append(waiting.pop(0))
            heartbeat.begun = time.monotonic()
            deltas = [delta for one in running if (delta := one.step()) is not None]
            time.sleep(float(options.get("step_s", 0.002)))
            heartbeat.begun = None
            running = [one for one in running if one.num_tokens < one.request.max_tokens]
            if deltas:
                wire.send(Deltas(deltas))


if __name__ == "__main__":
    main()
