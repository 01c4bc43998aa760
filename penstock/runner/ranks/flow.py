"""Hidden states from one pipeline stage to the next."""

from __future__ import annotations

import queue
import struct
import threading
import time

import torch
from torch import Tensor

from penstock.errors import RankLost
from penstock.runner.ranks.link import LinkClosed, RankLink

HEADER = struct.Struct("<QII")  # the plan's number, tokens, width


class Inbox:
    """Reads a link's frames in a thread of its own: who sends never waits for a computation, or for another sender."""

    def __init__(self, link: RankLink, name: str) -> None:
        self._link = link
        self._frames: queue.SimpleQueue[bytearray | LinkClosed] = queue.SimpleQueue()
        self.heard_s = time.monotonic()  # of the last frame
        self._thread = threading.Thread(target=self._read, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                self.heard_s = time.monotonic()
                self._frames.put(frame)
        except LinkClosed as error:
            self._frames.put(error)

    def get(self, wait_s: float | None = None) -> bytearray | None:
        """Wait for the next frame; None if none came in time. Raises LinkClosed after the last one."""
        try:
            frame = self._frames.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(frame, LinkClosed):
            self._frames.put(frame)
            raise frame
        return frame

    def close(self) -> None:
        self._link.end()
        self._thread.join()
        self._link.close()


class HiddenReceiver:
    """Hidden states of the stage before, from that rank."""

    def __init__(self, link: RankLink, rank: int) -> None:
        self._inbox, self._rank = Inbox(link, "hidden-states"), rank

    def receive(self, plan: int) -> Tensor:
        """Wait for the hidden states [T, C] of a plan; they come in the order of plans."""
        try:
            frame = self._inbox.get()
        except LinkClosed as error:
            raise RankLost(str(error), self._rank) from None
        assert frame is not None
        number, num_tokens, width = HEADER.unpack_from(frame)
        if number != plan:
            raise RankLost(f"hidden states of plan {number} came in place of those of plan {plan}", self._rank)
        return torch.frombuffer(frame, dtype=torch.float32, offset=HEADER.size).view(num_tokens, width)

    def close(self) -> None:
        self._inbox.close()


class HiddenSender:
    """Hidden states for the stage after, to that rank."""

    def __init__(self, link: RankLink, rank: int) -> None:
        self._link, self._rank = link, rank

    def send(self, plan: int, hidden: Tensor) -> None:
        """Send hidden states [T, C] float32."""
        if hidden.dtype is not torch.float32 or not hidden.is_contiguous():
            raise ValueError(f"hidden states are {hidden.dtype}, with strides {hidden.stride()}")
        try:
            self._link.send(HEADER.pack(plan, *hidden.shape), memoryview(hidden.numpy().data).cast("B"))
        except LinkClosed as error:
            raise RankLost(str(error), self._rank) from None

    def close(self) -> None:
        self._link.close()
