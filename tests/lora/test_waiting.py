"""Requests that wait while an adapter is read, or whose adapter cannot be read."""

from __future__ import annotations

import logging

import pytest

from penstock.engine.executor import Answer, Awaited, Done, LoadLora
from penstock.types import LoraUse, Request
from tests.engine.stage import Stage

USE = (LoraUse("mine", 1),)
PATH = "/srv/secret/mine"


class Reading:
    """The ticket of a folder that is read until `answer` is set."""

    answer: Answer | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None

    def result(self) -> Answer:
        assert self.answer is not None, "the loop waited"
        return self.answer


def make() -> tuple[Stage, Reading]:
    """Make an engine that knows an adapter, which is on disk."""
    stage, reading = Stage(), Reading()
    stage.scheduler.enable_loras(1, 1)

    def tell(message: object) -> Awaited[Answer]:
        return reading if isinstance(message, LoadLora) else Done(Answer())

    stage.engine.loras.connect(tell)
    stage.engine.loras.load(LoadLora(1, PATH, "f"))
    return stage, reading


def ask(stage: Stage, id: str, loras: tuple[LoraUse, ...] = USE) -> None:
    stage.scheduler.add(Request(id=id, tokens=(1, 2, 3), max_tokens=4, loras=loras))


def test_a_step_returns_while_an_adapter_is_read() -> None:
    stage, reading = make()
    ask(stage, "a")
    assert not stage.engine.step(waits_for_loras=False) and stage.engine.awaits_loras
    reading.answer = Answer({"fingerprint": "f"})
    while stage.engine.has_work:
        stage.engine.step(waits_for_loras=False)
        assert not stage.engine.awaits_loras


def test_clients_see_no_folder(caplog: pytest.LogCaptureFixture) -> None:
    stage, reading = make()
    ask(stage, "a")
    stage.engine.step(waits_for_loras=False)
    reading.answer = Answer(error=f"{PATH} has changed")
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        (delta,) = stage.engine.step()
    assert delta.error == "adapter 'mine' cannot be read again: ask the admin to load it again"
    assert PATH in caplog.text


def test_a_suspect_that_reads_its_adapter_preempts_nobody() -> None:
    stage, reading = make()
    ask(stage, "plain", ())
    stage.engine.step()
    ask(stage, "adapted")
    (sequence,) = stage.scheduler.roster.requests["adapted"]
    sequence.suspect = len(sequence.tokens)
    for _ in range(3):
        assert not stage.engine.step(waits_for_loras=False) and stage.engine.awaits_loras
    assert not stage.scheduler.stats.num_preemptions and len(stage.scheduler.roster.running) == 1
    reading.answer = Answer({"fingerprint": "f"})
    while stage.engine.has_work:
        stage.engine.step()
    assert stage.scheduler.stats.num_failed == 0


def test_many_scales_do_not_take_all_slots() -> None:
    """Each is a set of its own: a tenant with long answers of many keeps its share of the slots, and all end."""
    stage = Stage()
    stage.scheduler.enable_loras(4, 2)
    stage.engine.loras.connect(lambda message: Done(Answer({"fingerprint": "f"})))
    for number in (1, 2):
        stage.engine.loras.load(LoadLora(number, PATH, "f"))

    def send(id: str, tenant: str, use: LoraUse, max_tokens: int) -> None:
        request = Request(id=id, tokens=(1, 2, 3), max_tokens=max_tokens, loras=(use,), tenant=tenant)
        stage.scheduler.add(request)

    for number in range(6):
        send(f"hog-{number}", "hog", LoraUse("one", 1, 0.999 + number / 1e4), 40)
    for _ in range(4):
        stage.engine.step()
    assert len(stage.scheduler.roster.running) == 4
    send("guest", "guest", LoraUse("two", 2), 3)
    ended: list[str] = []
    steps: list[int] = []  # that the guest took
    while stage.engine.has_work:
        ended += [delta.request_id for delta in stage.engine.step() if delta.finish_reason]
        stage.scheduler.check()
        if "guest" not in ended:
            steps.append(len(stage.scheduler.roster.running))
    assert ended[0] == "guest" and len(ended) == 7 and len(steps) < 8
    assert stage.scheduler.stats.num_preemptions == 1
