"""The other ranks, as rank 0 sees them: who has come, what they say, and when one is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from penstock.engine.executor import Answer
from penstock.errors import EngineFailed, PenstockError, RankLost
from penstock.runner.ranks.layout import RankLayout
from penstock.runner.ranks.link import LinkClosed, Listener, RankLink
from penstock.runner.ranks.messages import (
    ControlAnswer,
    End,
    Hello,
    HiddenHello,
    Identity,
    RankBeat,
    RankFailed,
    RankReady,
    RankRefused,
    Setup,
    ToRank,
    decode_from_rank,
    encode,
    require_equal,
)

HEARTBEAT_S = 1.0
MAX_SILENCE_S = 10.0  # of a rank; it sends a heartbeat every second, whatever it computes
MAX_LOADING_SILENCE_S = 60.0  # importing large libraries holds the GIL
LOSS_S = 0.25  # until a rank's own connection tells that it is gone, which says more than what others noticed
GREETED_S = 10.0  # for the first message of a connection
_log = logging.getLogger(__name__)


class Backend(Protocol):
    """Starts the processes of the other ranks."""

    def start(self, port: int) -> None:
        """Start those that are ours to start; rank 0 listens at `port`."""

    def find_dead(self) -> str | None:
        """Describe a process that has ended; None if there is none."""

    def kill(self) -> None:
        """End them at once: one is lost, and may hang."""

    def close(self) -> None:
        """Wait until all have ended, as they were told to."""


class RankGroup:
    def __init__(self, layout: RankLayout, listener: Listener, backend: Backend) -> None:
        self.layout = layout
        self.failure: RankLost | None = None
        self.on_loss: Callable[[RankLost], None] = lambda lost: None
        self.hellos: dict[int, Hello] = {}
        self._listener, self._backend = listener, backend
        self._links: dict[int, RankLink] = {}
        self._upstream: RankLink | None = None
        self._news = threading.Condition()
        self.loaded: dict[int, RankReady] = {}
        self.beats: dict[int, tuple[float, RankBeat]] = {}  # the last of each rank, and when it came
        self._answers: dict[int, dict[int, Answer]] = {}  # by number of the message, and rank
        self._threads: list[threading.Thread] = []
        self._is_closing = threading.Event()

    @property
    def port(self) -> int:
        return self._listener.port

    def gather(self, identity: Identity, wait_s: float) -> Mapping[int, Hello]:
        """Start the other ranks and wait until all have come, each as rank 0 is."""
        self._backend.start(self._listener.port)
        deadline = time.monotonic() + wait_s
        while len(self.hellos) < self.layout.num_ranks - 1:
            self._require_alive()
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, self.layout.num_ranks)) - set(self.hellos))
                raise EngineFailed(
                    f"ranks {missing} did not come in {wait_s:g} s: start the same command on their machines, with "
                    "their --node-rank"
                )
            self._admit(identity)
        return self.hellos

    def _require_alive(self) -> None:
        dead = self._backend.find_dead()
        if dead is not None:
            raise RankLost(dead)

    def _admit(self, identity: Identity) -> None:
        """Take one connection, if there is one: a rank's, or that of its hidden states."""
        link = self._listener.accept(HEARTBEAT_S / 4)
        if link is None:
            return
        try:
            hello = decode_from_rank(link.receive(GREETED_S))
            if isinstance(hello, HiddenHello):
                self._upstream = link
                return
            if not isinstance(hello, Hello) or not 0 < hello.rank < self.layout.num_ranks:
                raise LinkClosed(f"its first message is {type(hello).__name__}")
        except (LinkClosed, msgspec.DecodeError) as error:
            _log.warning("refused a connection from %s: %s", link.peer, error)
            link.close()
            return
        try:
            require_equal(hello.rank, identity, hello.identity)
            if hello.rank in self.hellos:
                raise EngineFailed(f"rank {hello.rank} has come twice: give each machine its own --node-rank")
        except PenstockError as error:
            link.send(encode(RankRefused(str(error))))
            link.close()
            raise
        self.hellos[hello.rank], self._links[hello.rank] = hello, link

    def set_up(self, setups: Mapping[int, Setup]) -> None:
        """Tell each rank what to load, and listen to them from now on."""
        for rank, setup in setups.items():
            thread = threading.Thread(target=self._listen, args=(rank,), name=f"penstock-rank-{rank}", daemon=True)
            self._send(rank, setup)
            thread.start()
            self._threads.append(thread)
        beat = threading.Thread(target=self._beat, name="penstock-rank-heartbeat", daemon=True)
        beat.start()
        self._threads.append(beat)

    def join(self) -> RankLink | None:
        """Wait until all ranks are ready; returns the connection of the stage before, if there is one."""
        if self.layout.num_stages > 1:
            while self._upstream is None:
                self.check()
                self._admit(self.hellos[1].identity)
        with self._news:
            while len(self.loaded) < self.layout.num_ranks - 1:
                self.check()
                self._news.wait(HEARTBEAT_S)
        self._listener.close()
        return self._upstream

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def broadcast(self, message: ToRank) -> None:
        """Send a message to all ranks, after those sent before."""
        data = encode(message)
        for rank, link in self._links.items():
            try:
                link.send(data)
            except LinkClosed as error:
                self.lose(rank, str(error))
        self.check()

    def take_answers(self, number: int) -> dict[int, Answer] | None:
        """Return the answers of all ranks to a control message; None while some are missing."""
        self.check()
        with self._news:
            return self._answers.pop(number) if self._has_all(number) else None

    def await_answers(self, number: int) -> dict[int, Answer]:
        """Wait for the answers of all ranks."""
        with self._news:
            while not self._has_all(number):
                self.check()
                self._news.wait(HEARTBEAT_S)
            return self._answers.pop(number)

    def _has_all(self, number: int) -> bool:
        return len(self._answers.get(number, ())) == len(self._links)

    def wait(self, wait_s: float) -> None:
        """Wait for news, at most so long."""
        with self._news:
            self._news.wait(wait_s)

    def await_loss(self, wait_s: float) -> None:
        """Wait for a rank to be lost, at most so long."""
        with self._news:
            self._news.wait_for(lambda: self.failure is not None, wait_s)

    def lose(self, rank: int, why: str) -> None:
        """Note that a rank is lost."""
        hello = self.hellos.get(rank)  # none of rank 0
        who = "" if hello is None else f" (process {hello.pid} on {hello.node})"
        self.fail(RankLost(f"rank {rank}{who} is lost: {why}", rank))

    def fail(self, failure: RankLost) -> None:
        """End all ranks. Whoever waits for one gets to know why."""
        with self._news:
            if self.failure is not None or self._is_closing.is_set():
                return
            self.failure = failure
            self._news.notify_all()
        for link in [*self._links.values(), self._upstream]:
            if link is not None:
                link.end()
        self._backend.kill()
        self.on_loss(failure)

    def _send(self, rank: int, message: ToRank) -> None:
        try:
            self._links[rank].send(encode(message))
        except LinkClosed as error:
            self.lose(rank, str(error))
            self.check()

    def _listen(self, rank: int) -> None:
        link = self._links[rank]
        try:
            while True:
                silence_s = MAX_SILENCE_S if rank in self.loaded else MAX_LOADING_SILENCE_S
                message = decode_from_rank(link.receive(silence_s))
                if isinstance(message, RankFailed):
                    if message.rank >= 0:
                        self.await_loss(LOSS_S)
                    return self.lose(rank if message.rank < 0 else message.rank, message.error)
                with self._news:
                    if isinstance(message, RankBeat):
                        self.beats[rank] = time.monotonic(), message
                    elif isinstance(message, RankReady):
                        self.loaded[rank] = message
                    elif isinstance(message, ControlAnswer):
                        self._answers.setdefault(message.number, {})[rank] = message.answer
                    self._news.notify_all()
        except (LinkClosed, msgspec.DecodeError) as error:
            self.lose(rank, str(error))

    def _beat(self) -> None:
        while not self._is_closing.wait(HEARTBEAT_S):
            for link in self._links.values():
                try:
                    link.send(encode(RankBeat()))
                except LinkClosed:
                    return  # whoever listens to that rank tells

    def close(self) -> None:
        """End all ranks, lost or not."""
        self._is_closing.set()
        for link in self._links.values():
            with suppress(LinkClosed):
                link.send(encode(End()))
        self._listener.close()
        self._backend.close()
        for one in [*self._links.values(), self._upstream]:
            if one is not None:
                one.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for link in self._links.values():
            link.close()
