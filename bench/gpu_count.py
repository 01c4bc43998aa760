"""What an engine on a GPU does in a run that is not timed: its plans, and when the device was at work on each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.roofline import Timed
from penstock.engine.executor import Ticket
from penstock.engine.plan import Plan, Result

WINDOW = 8  # steps that are traced kernel by kernel
NUM_KERNELS = 12  # named in a trace
TO_DEVICE = "Memcpy HtoD"


class Recorder:
    """Stands between an engine and its executor while a run lasts.

    A step begins where its numbers are sent to the device, after all that the host prepared for it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._inner = engine, engine.executor
        self._begun: Any = None
        self.plans: list[Plan] = []
        self._moments: list[tuple[Any, Any]] = []

    def __enter__(self) -> Recorder:
        self._engine.executor = self
        self._staging = getattr(getattr(self._inner, "runner", self._inner), "_staging", None)
        if self._staging is not None:
            self._staging.send = self._sending(self._staging.send)
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.executor = self._inner
        if self._staging is not None:
            del self._staging.send

    def _sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(*values: Any, **more: Any) -> Any:
            self._begun = _now()
            return send(*values, **more)

        return sent

    def start(self, plan: Plan) -> Ticket[Result]:
        self.plans.append(plan)
        self._begun = begun = _now()
        ticket: Ticket[Result] = self._inner.start(plan)
        self._moments.append((self._begun or begun, _now()))
        return ticket

    def control(self, message: object) -> Any:
        return self._inner.control(message)

    def close(self) -> None:
        self._inner.close()

    def times(self) -> list[Timed] | None:
        """Of each plan; None without a GPU."""
        if not self._moments or self._moments[0][0] is None:
            return None
        self._moments[-1][1].synchronize()
        before = [0.0, *(max(0.0, a[1].elapsed_time(b[0])) for a, b in zip(self._moments, self._moments[1:]))]
        return [Timed(begin.elapsed_time(end) / 1e3, idle / 1e3) for (begin, end), idle in zip(self._moments, before)]


def _now() -> Any:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class Activity:
    name: str
    begin_ns: int
    end_ns: int


@dataclass
class Trace:
    """Kernels of some steps: in what share of the time none ran though a step was under way, and which took longest."""

    num_steps: int
    gap_share: float
    kernels: dict[str, float] = field(default_factory=dict)  # microseconds a step

    def as_dict(self) -> dict[str, Any]:
        return {"steps": self.num_steps, "launch_gap_share": round(self.gap_share, 4), "us_per_step": self.kernels}


def trace(activities: Iterable[Activity], num_steps: int) -> Trace:
    """A pause before numbers are sent to the device is the host's; any other is a gap between launches."""
    busy = gaps = 0
    end = 0
    totals: dict[str, int] = {}
    for one in sorted(activities, key=lambda activity: activity.begin_ns):
        if end and one.begin_ns > end and not one.name.startswith(TO_DEVICE):
            gaps += one.begin_ns - end
        busy += max(0, one.end_ns - max(end, one.begin_ns))
        end = max(end, one.end_ns)
        totals[one.name] = totals.get(one.name, 0) + one.end_ns - one.begin_ns
    longest = sorted(totals, key=lambda name: -totals[name])[:NUM_KERNELS]
    return Trace(
        num_steps,
        gaps / max(1, gaps + busy),
        {name[:90]: round(totals[name] / 1e3 / max(1, num_steps), 2) for name in longest},
    )


def windows(singles: Sequence[bool]) -> dict[bool, range]:
    """For steps of single tokens only, and for others: the middle of their longest run of each."""
    best: dict[bool, range] = {}
    begin = 0
    for end in range(1, len(singles) + 1):
        if end == len(singles) or singles[end] != singles[begin]:
            if end - begin > len(best.get(singles[begin], ())):
                best[singles[begin]] = range(begin, end)
            begin = end
    middles = {}
    for kind, run in best.items():
        first = run.start + max(0, len(run) - WINDOW) // 2
        middles[kind] = range(first, min(run.stop, first + WINDOW))
    return middles


class Tracer:
    """As `Recorder`, but traces one window of steps."""

    def __init__(self, engine: Any, window: range) -> None:
        self._engine, self._inner, self._window = engine, engine.executor, window
        self._profile: Any = None
        self._number = 0
        self.found: Trace | None = None

    def __enter__(self) -> Tracer:
        self._engine.executor = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.executor = self._inner
        self._end()

    def start(self, plan: Plan) -> Ticket[Result]:
        import torch

        if self._number == self._window.start:
            torch.cuda.synchronize()
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            with _tolerated():
                profile.start()
                self._profile = profile
        elif self._number == self._window.stop:
            self._end()
        self._number += 1
        ticket: Ticket[Result] = self._inner.start(plan)
        return ticket

    def control(self, message: object) -> Any:
        return self._inner.control(message)

    def close(self) -> None:
        self._inner.close()

    def _end(self) -> None:
        import torch

        profile, self._profile = self._profile, None
        if profile is None:
            return
        torch.cuda.synchronize()
        with _tolerated():
            profile.stop()
            events = [
                Activity(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
                for event in profile.profiler.kineto_results.events()
                if "CUDA" in str(event.device_type()) and event.duration_ns()
            ]
            self.found = trace(events, len(self._window))


@contextmanager
def _tolerated() -> Iterator[None]:
    """A profiler that fails is no reason to end."""
    try:
        yield
    except Exception as error:
        print(f"note: nothing was traced ({type(error).__name__}: {error})", file=sys.stderr)
