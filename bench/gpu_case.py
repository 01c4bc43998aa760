"""One shape with one choice of options, measured in the process that calls this."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import roofline
from bench.gpu_count import Recorder, Trace, Tracer, windows
from bench.gpu_score import Answered, decoded, own_logprobs, score
from bench.gpu_sets import FIRST_SHARE, LARGE, PUBLISHED, SHAPES, START, is_met, num_common, requests, rival, target
from bench.lora import write_adapter

LORA_RANK = 16
WARM_SEED, FIRST_SEED, SEEDS = 9, 5, (1, 2)
WARM_SETS = (("bs1", 1), ("256x128in512out", 64))
Items = list[tuple[list[int], int]]
Figures = dict[str, Any]


def age_s() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Settings:
    """What a case is besides its shape."""

    options: dict[str, Any]  # of LLM
    kinds: list[str]
    ceilings: dict[str, float]  # as `bench.ceilings.measure` has them; empty without a GPU
    counters: bool = True
    profile: bool = False
    score: int = 0
    start: str = "as found"  # of Triton's cache
    adapters: int = 0  # that requests name in turn

    def device(self) -> roofline.Ceilings:
        bf16 = self.ceilings["bf16_tflop_s"] * 1e12
        layers = self.ceilings.get("fp8_tflop_s", 0.0) * 1e12 if self.options.get("quantization") == "fp8" else bf16
        return roofline.Ceilings(self.ceilings["copy_tb_s"] * 1e12, bf16, layers or bf16)


@dataclass(frozen=True)
class Run:
    seed: int
    items: Items
    answers: list[list[int]]
    figures: Figures


def write_shape(shape: str) -> str:
    """A folder with nothing but the shape's config.json."""
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


def _report(figures: Figures) -> None:
    print(json.dumps({"engine": "penstock", **figures}), flush=True)


class Case:
    def __init__(self, shape: str, settings: Settings, **more: Any) -> None:
        """`more` are options of LLM that no timed case has."""
        from penstock import LLM

        self.shape, self.settings = shape, settings
        self.folder = write_shape(shape)
        options = {
            "max_model_len": 17000,
            "gpu_memory_utilization": 0.85,
            "max_num_seqs": 256,
            "seed": 0,
            **settings.options,
            **more,
        }
        if settings.adapters:
            options |= {"enable_lora": True, "max_loras": settings.adapters, "max_lora_rank": LORA_RANK}
        self.llm = LLM(model=self.folder, load_format="dummy", skip_tokenizer_init=True, progress=False, **options)
        self.loaded_s = age_s()
        place = Path(tempfile.mkdtemp())
        self.adapters = [
            write_adapter(place / f"adapter-{seed}", self.llm, LORA_RANK, seed) for seed in range(settings.adapters)
        ]
        self.run([(list(range(2000, 2128)), 1)])
        self.ready_s = age_s()

    @property
    def quantization(self) -> str | None:
        return self.settings.options.get("quantization")

    def _generate(self, items: Items) -> list[list[int]]:
        from penstock import SamplingParams

        params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count) for _, count in items]
        self.llm.reset_prefix_cache()
        loras = [self.adapters[at % len(self.adapters)] for at in range(len(items))] if self.adapters else None
        prompts = [prompt for prompt, _ in items]
        outputs = self.llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        if [len(answer) for answer in answers] != [count for _, count in items]:
            raise AssertionError("every output must have its requested length")
        return answers

    def run(self, items: Items, seed: int = 0) -> Run:
        """Timed: nothing is recorded meanwhile."""
        before = self.llm.stats()
        begin = time.perf_counter()
        answers = self._generate(items)
        seconds = time.perf_counter() - begin
        after = self.llm.stats()
        steps = after["num_steps"] - before["num_steps"]
        waited = after["forward_s"] - before["forward_s"]
        made = sum(len(answer) for answer in answers)
        total = made + sum(len(prompt) for prompt, _ in items)
        return Run(
            seed,
            items,
            answers,
            {
                "s": round(seconds, 3),
                "out_tok_s": round(made / seconds, 1),
                "total_tok_s": round(total / seconds, 1),
                "steps": steps,
                "ms_per_step": round(seconds / steps * 1e3, 3),
                "host_ms_per_step": round((seconds - waited) / steps * 1e3, 3),
                "cached_tokens": after["num_cached_tokens"] - before["num_cached_tokens"],
            },
        )

    def counted(self, run: Run) -> Figures:
        """The same requests once more, with all that costs time to know: what the steps had to do at least, what the
        device did meanwhile, and what bounds the run."""
        engine: Any = self.llm.service.engine
        runner: Any = getattr(engine.executor, "runner", engine.executor)  # as it was before runners were executors
        with Recorder(engine) as recorder:
            self._generate(run.items)
        grouping = runner.memory.grouping
        costs = roofline.Costs.of(runner.model, len(grouping.groups) * grouping.block_bytes // runner.memory.block_size)
        common = num_common([prompt for prompt, _ in run.items])
        steps = [roofline.count(plan, common) for plan in recorder.plans]
        times = recorder.times()
        found: Figures = {}
        if times is not None:
            found |= {
                "idle_ms_per_step": round(sum(one.idle_s for one in times) / len(times) * 1e3, 3),
                "device_ms_per_step": round(sum(one.device_s for one in times) / len(times) * 1e3, 3),
            }
        if not self.settings.ceilings:
            return found
        floors = [roofline.floor(step, costs, self.settings.device()) for step in steps]
        found["roofline"] = roofline.summary(steps, floors, run.figures["s"])
        if times is not None:
            traces = self._traced(run, steps) if self.settings.profile else {}
            shares = (
                [traces[kind].gap_share if kind in traces else 0.0 for kind in (step.num_prompt == 0 for step in steps)]
                if traces
                else None
            )
            found["device_s"] = roofline.bounds(floors, times, shares)
            found["bound_by"] = roofline.verdict(found["device_s"], found["roofline"])
            if traces:
                found["traces"] = {"single" if kind else "mixed": one.as_dict() for kind, one in traces.items()}
        return found

    def _traced(self, run: Run, steps: list[roofline.Counted]) -> dict[bool, Trace]:
        """Kernel by kernel, some steps of single tokens and some others."""
        traces: dict[bool, Trace] = {}
        for kind, window in windows([step.num_prompt == 0 for step in steps]).items():
            with Tracer(self.llm.service.engine, window) as tracer:
                self._generate(run.items)
            if tracer.found is not None:
                traces[kind] = tracer.found
        return traces

    def _named(self, kind: str, value: float) -> Figures:
        """A case's name, its value beside the rival's and the target."""
        figures: Figures = {"shape": self.shape, **self.settings.options, "kind": kind}
        if self.adapters:  # the figures to compare with are those of the bare model
            return figures | {"adapters": len(self.adapters)}
        wanted, other = (of(self.shape, self.quantization, kind) for of in (target, rival))
        if other is not None:
            figures["vllm"] = other
        if kind in PUBLISHED:
            figures["tensorrt_llm_published"] = PUBLISHED[kind]
        if wanted is not None:
            figures |= {"target": wanted, "met": is_met(kind, value, wanted)}
        return figures

    def start(self) -> float:
        """Report the start, and the first run after it; its tokens per second."""
        kind = self.settings.kinds[0]
        first = self.run(requests(kind, FIRST_SEED))
        _report(
            {
                **self._named(START, self.ready_s),
                "triton_cache": self.settings.start,
                "loaded_s": round(self.loaded_s, 2),
                "ready_s": round(self.ready_s, 2),
                "first_kind": kind,
                "first_out_tok_s": first.figures["out_tok_s"],
            }
        )
        return float(first.figures["out_tok_s"])

    def measure(self) -> None:
        first = self.start()
        for kind, count in WARM_SETS:
            self.run(requests(kind, WARM_SEED)[:count])
        kept: list[list[Answered]] = []
        for kind in self.settings.kinds:
            runs = [self.run(requests(kind, seed), seed) for seed in (SEEDS[:1] if kind in LARGE else SEEDS)]
            best = max(runs, key=lambda run: float(run.figures["out_tok_s"]))
            value = float(best.figures["out_tok_s"])
            figures = {
                **self._named(kind, value),
                "seed": best.seed,
                **best.figures,
                "out_tok_s_of_each": [run.figures["out_tok_s"] for run in runs],
            }
            if kind == self.settings.kinds[0]:
                figures |= {
                    "first_out_tok_s": first,
                    "first_share": round(first / value, 3),
                    "first_met": first >= FIRST_SHARE * value,
                }
            if self.settings.counters:
                figures |= self.counted(best)
            _report(figures)
            kept.append([Answered(prompt, answer) for (prompt, _), answer in zip(best.items, best.answers)])
        if self.settings.score:
            self._score(kept)

    def _score(self, kept: list[list[Answered]]) -> None:
        """Sequences of the timed runs, some of each set; and as many that are decoded anew."""
        most = self.settings.score
        timed = [one for same in zip(*(runs[:most] for runs in kept)) for one in same][:most]
        timed = timed + [one for runs in kept for one in runs if one not in timed][: most - len(timed)]
        own = own_logprobs(self.llm, timed)
        again, told = decoded(self.llm, [one.prompt for one in timed], 64)
        service = self.llm.service
        spec, settings = service.assembly.spec, service.assembly.settings
        dtype, device = settings.dtype, settings.device
        del service, settings
        gc.unfreeze()
        self.llm.close()
        gc.collect()
        _report(
            {
                "shape": self.shape,
                **self.settings.options,
                "kind": "score",
                **score(self.folder, spec, dtype, device, {"timed": (timed, own), "decoded": (again, told)}),
            }
        )
