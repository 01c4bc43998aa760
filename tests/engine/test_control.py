"""Control messages: obeyed in order with plans, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engine.executor import Answer, Describe
from penstock.engine.ipc import CommandLoop
from penstock.engine.messages import Answered, Command, Control, Report, Stop
from tests.engine.stage import Stage


def test_a_message_is_obeyed_after_the_plans_started_before_it() -> None:
    """Breaks if a lazy device answers before it has run what was started."""
    stage = Stage(overlap=1)
    stage.add(9, max_tokens=6)
    for num_plans in (1, 2):
        assert stage.engine.start()
        assert stage.engine.control(Describe()) == Answer({"device": "simulated", "num_plans": num_plans})
    stage.run()
    assert stage.engine.control(Describe()).values["num_plans"] == stage.stats.num_steps


class FakeWire:
    """Commands and reports cross it as bytes."""

    def __init__(self, *commands: Command) -> None:
        self.commands = [msgspec.msgpack.encode(command) for command in commands]
        self.reports: list[Report] = []

    def receive(self, wait_s: float | None) -> list[Command]:
        return [msgspec.msgpack.decode(raw, type=Command) for raw in self.commands]

    def send(self, report: Report) -> None:
        self.reports.append(msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Report))


def test_messages_cross_processes_by_name() -> None:
    stage = Stage()
    commands = Control("a", "Describe"), Control("b", "Sleep"), Control("c", "Describe", {"depth": 2}), Stop()
    wire: Any = FakeWire(*commands)
    CommandLoop(stage.engine, wire, None, lambda request: None).serve()  # type: ignore[arg-type]
    obeyed, unknown, odd = wire.reports
    assert obeyed == Answered("a", Answer({"device": "simulated", "num_plans": 0}))
    known = "is unknown: send Describe, LoadLora, DropLora, SaveSession, EraseSession"
    assert unknown.id == "b" and unknown.answer.error == f"control message Sleep with no values {known}"
    assert odd.answer.error == f"control message Describe with ['depth'] {known}"
