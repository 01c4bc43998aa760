"""The body of a response, as routes may write it past their own tasks."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class CycleBody:
    """The body of a cycle's response, written without its task."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow = cycle, cycle.flow

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started and not self._cycle.response_complete

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return cycle.response_started and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    @property
    def is_held_up(self) -> bool:
        return self._flow.write_paused and not self._cycle.disconnected

    def write(self, data: bytes) -> None:
        cycle = self._cycle
        if not cycle.disconnected and not cycle.response_complete:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)
