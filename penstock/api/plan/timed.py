"""Times of a CPU's steps: the real runner computes the model's first layers with blank weights, and time is scaled."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from penstock.api.plan.fit import storage_options
from penstock.api.plan.speed import CACHE, PRODUCTS, WEIGHTS, Demand
from penstock.errors import InvalidConfig
from penstock.models.decoder import CPU
from penstock.models.spec import ModelSpec
from penstock.passes.outline import blank_model
from penstock.types import Request, SamplingParams

if TYPE_CHECKING:
    from penstock.config import Resolved
    from penstock.engine.engine import Engine
    from penstock.models.files import Checkpoint

MAX_BLANK_BYTES = (
    256 << 20
)  # of layers; whole models that are smaller run whole, so that caches help no more than later
TIMED_PROMPT = 512
TIMED_STEPS = 8
MIN_DEPTH, MAX_DEPTH = 32, 1024


@dataclass(frozen=True)
class _Sample:
    """Seconds of one prefill, and of decode steps: alone, alone at depth, and with all rows."""

    prefill_s: float
    single_s: float
    deep_s: float
    rows_s: float


class TimedSteps:
    """Steps of the whole model, extrapolated from its first layers: outside of them a step takes the same."""

    def __init__(self, few: _Sample, many: _Sample, scale: float, timed: Demand, depth: int) -> None:
        """`many` has more layers than `few`; one more of their difference is added `scale` times."""

        def extrapolate(a: float, b: float) -> float:
            return max(b, b + scale * (b - a))

        self._prefill_s = extrapolate(few.prefill_s, many.prefill_s)
        self._single_s = extrapolate(few.single_s, many.single_s)
        self._deep_s = extrapolate(few.deep_s, many.deep_s)
        self._rows_s = extrapolate(few.rows_s, many.rows_s)
        self._timed, self._depth = timed, depth

    def decode(self, rows: int, length: float) -> dict[str, float]:
        position_s = max(0.0, self._deep_s - self._single_s) / max(1, self._depth - MIN_DEPTH)
        row_s = max(0.0, self._rows_s - self._single_s) / max(1, self._timed.concurrency - 1)
        return {
            WEIGHTS: self._single_s,
            PRODUCTS: (rows - 1) * row_s,
            CACHE: position_s * rows * max(0.0, length - MIN_DEPTH),
        }

    def prefill(self, length: int, count: int, num_steps: int) -> float:
        """A prompt's attention grows with its square; the timed one's is in its time."""
        pair_s = max(0.0, self._deep_s - self._single_s) / max(1, self._depth - MIN_DEPTH)
        extra = max(0.0, (length - self._timed.prompt) / 2) * length * pair_s * _PAIR_SHARE
        return count * (self._prefill_s * length / self._timed.prompt + extra)


_PAIR_SHARE = 0.25  # a prompt's queries share the reads of a position, which one decode row does not


def time_steps(checkpoint: Checkpoint | None, spec: ModelSpec, settings: Resolved, load: Demand) -> TimedSteps:
    """Run prefills and decode steps of a few layers. Takes some seconds."""
    from penstock.ops import cpu

    cpu.set_num_threads(settings.threads)
    few, many = _count_layers(spec, settings)
    depth = min(MAX_DEPTH, spec.max_model_len - 2 * TIMED_STEPS)
    prompt = min(TIMED_PROMPT, depth)
    timed = replace(load, concurrency=min(load.concurrency, 64), prompt=prompt)
    samples = [_sample(checkpoint, spec, settings, count, timed, depth) for count in (few, many)]
    return TimedSteps(
        samples[0], samples[1], (spec.num_layers - many) / (many - few) if many > few else 0.0, timed, depth
    )


def _count_layers(spec: ModelSpec, settings: Resolved) -> tuple[int, int]:
    """Choose how many layers to time: all if they are small, else few that are enough to fill caches."""
    total = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in spec.parameters().values())
    each = max(1, total // max(1, spec.num_layers))  # bytes of a layer, about: one a value
    many = max(2, min(spec.num_layers, MAX_BLANK_BYTES // each))
    many = min(many, spec.num_layers)
    return (max(1, many // 2) if many < spec.num_layers else many), many


def _sample(
    checkpoint: Checkpoint | None, spec: ModelSpec, settings: Resolved, num_layers: int, load: Demand, depth: int
) -> _Sample:
    from penstock.api.engine.start import start_engine

    model = blank_model(checkpoint, spec, storage_options(settings), CPU, num_layers)
    rows = min(load.concurrency, settings.max_num_seqs)
    own = replace(
        settings,
        speculative_config="off",
        enable_prefix_caching=False,
        kv_cache_tokens=max(depth + 64, rows * (MIN_DEPTH + 4 * TIMED_STEPS)) + 64,
        max_num_batched_tokens=max(load.prompt, settings.max_num_batched_tokens),
    )
    engine = start_engine(model, own)
    try:
        _time(engine, 1, load.prompt, 1)  # first touches
        prefill_s, _ = _time(engine, 1, load.prompt, 1)
        _, single_s = _time(engine, 1, MIN_DEPTH - TIMED_STEPS, TIMED_STEPS)
        _, deep_s = _time(engine, 1, depth, TIMED_STEPS)
        rows_s = _time(engine, rows, MIN_DEPTH - TIMED_STEPS, TIMED_STEPS)[1] if rows > 1 else single_s
    finally:
        engine.close()
    return _Sample(prefill_s, single_s, deep_s, rows_s)


def _time(engine: Engine, rows: int, prompt: int, steps: int) -> tuple[float, float]:
    """Run requests of blank tokens; returns the seconds of all steps with prompts, and the median of the others."""
    for number in range(rows):
        sampling = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=str(number), tokens=(1,) * prompt, sampling=sampling, max_tokens=steps + 1))
    prompts_s, others_s = 0.0, []
    has_prompts: list[bool] = []
    engine.watch = lambda plan: has_prompts.append(any(row.count > 1 for row in plan.rows))
    while engine.has_work:
        begun_s = time.perf_counter()
        deltas = engine.step()
        seconds = time.perf_counter() - begun_s
        if failed := next((delta.error for delta in deltas if delta.error), None):
            raise InvalidConfig(f"speed cannot be measured here: a step with blank weights failed: {failed}")
        if has_prompts[-1]:
            prompts_s += seconds
        else:
            others_s.append(seconds)
    return prompts_s, median(others_s[2:] or others_s or [prompts_s])  # the first ones are recorded
