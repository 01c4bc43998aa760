"""A rank that does not choose tokens: it computes its share of every plan, and obeys control messages in order."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from penstock.engine.executor import Answer, Awaited, LoadLora, make_message
from penstock.errors import RankLost
from penstock.host.machine import free_memory_bytes, resident_bytes
from penstock.host.parent import ORPHANED
from penstock.layers import Received
from penstock.runner.cpu.runner import Runner
from penstock.runner.ranks.facts import count_held
from penstock.runner.ranks.flow import HiddenReceiver, HiddenSender, Inbox
from penstock.runner.ranks.group import HEARTBEAT_S, MAX_SILENCE_S
from penstock.runner.ranks.keeping import keep
from penstock.runner.ranks.link import LinkClosed, RankLink
from penstock.runner.ranks.messages import (
    Compute,
    ControlAnswer,
    ControlMessage,
    End,
    KeepBlocks,
    RankBeat,
    ToRank,
    decode_to_rank,
    encode,
)

ANSWERING_S = 0.01  # between looks at adapters that are being read


class RankHeartbeat(threading.Thread):
    """Tells rank 0 that this process lives, and ends the process when rank 0 does not."""

    def __init__(self, link: RankLink) -> None:
        super().__init__(name="penstock-heartbeat", daemon=True)
        self._link = link
        self.inbox: Inbox | None = None  # None: rank 0 loads, too

    def run(self) -> None:
        while True:
            checked_s = time.monotonic()
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - checked_s > HEARTBEAT_S + 1.0:
                continue  # this process was stopped, and has read nothing
            if self.inbox is not None and now - self.inbox.heard_s > MAX_SILENCE_S:
                os._exit(ORPHANED)
            try:
                self._link.send(encode(RankBeat(resident_bytes(), free_memory_bytes())))
            except LinkClosed:
                os._exit(ORPHANED)  # the main thread may wait for another rank


def is_later(runner: Runner) -> bool:
    """Return True if its model is a later stage."""
    return isinstance(runner.model.embedding, Received)


class Follower:
    def __init__(
        self,
        runner: Runner,
        link: RankLink,
        heartbeat: RankHeartbeat,
        receiver: HiddenReceiver | None,
        sender: HiddenSender | None,
        first: int,
    ) -> None:
        """`first` is the first of the ranks that share its layers."""
        self._runner, self._link, self._heartbeat = runner, link, heartbeat
        self._receiver, self._sender = receiver, sender
        self._first = first
        self._answers: list[tuple[ControlMessage, Awaited[Answer]]] = []
        self._seen: dict[int, str] = {}  # fingerprints of adapters; files of other machines have others

    def serve(self) -> None:
        """Work until told to stop; raises LinkClosed when rank 0 is gone."""
        self._heartbeat.inbox = inbox = Inbox(self._link, "plans")
        self._link.send(encode(count_held(self._runner)))
        while True:
            frame = inbox.get(ANSWERING_S if self._answers else None)
            self._answer()
            if frame is None:
                continue
            message: ToRank = decode_to_rank(frame)
            if isinstance(message, End):
                self._runner.close()
                return
            if isinstance(message, Compute):
                self._compute(message)
            elif isinstance(message, KeepBlocks):
                answer = keep(message, self._runner.memory, self._runner.store)
                self._link.send(encode(ControlAnswer(message.number, answer)))
            elif isinstance(message, ControlMessage):
                self._obey(message)

    def _compute(self, message: Compute) -> None:
        plan = message.plan
        if message.is_lost or not plan.rows:
            self._runner.apply(plan)
            return
        if self._receiver is not None:
            first: Received = self._runner.model.embedding  # type: ignore[assignment]
            first.take(self._receiver.receive(plan.number))
        try:
            computed = self._runner.compute(plan)
        except RankLost as error:  # in a collective, which counts the ranks of its stage
            raise RankLost("ranks that share its layers found it gone", self._first + error.rank) from None
        if self._sender is not None:
            self._sender.send(plan.number, computed.hidden)

    def _obey(self, control: ControlMessage) -> None:
        message = make_message(control.name, control.values)
        if isinstance(message, LoadLora) and message.fingerprint:
            message = replace(message, fingerprint=self._seen.get(message.number, ""))
        self._answers.append((control, self._runner.control(message)))

    def _answer(self) -> None:
        for control, ticket in [one for one in self._answers if one[1].is_done]:
            self._answers.remove((control, ticket))
            answer = ticket.result()
            if control.name == LoadLora.__name__ and answer.error is None:
                self._seen[control.values["number"]] = str(answer.values["fingerprint"])
            self._link.send(encode(ControlAnswer(control.number, answer)))
