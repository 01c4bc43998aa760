"""Output tokens per second on one GPU: random weights of real shapes, the request sets of `gpu_sets`.

Each shape runs in a process of its own, from its start: ready is when the first token of a request of 128 tokens has
come, imports included. Then the first set once, unprepared; then a warm-up; then every set with two seeds, of which the
faster counts. Counters come from one more run of the same requests, which is not timed. One line of JSON per case; all
of them and the device's ceilings go into one file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ceilings, limits
from bench.gpu_options import engine_options, parse
from bench.gpu_sets import RIVALS, TITLES
from bench.process import ROOT

Document = dict[str, Any]
COLD, WARM = "cold", "warm"


def main(words: Sequence[str] | None = None) -> int:
    chosen = parse(words)
    if chosen.inside:
        return inside(json.loads(chosen.inside))
    import torch

    if not torch.cuda.is_available():
        print("error: torch sees no GPU: run this on a machine with one, with a CUDA build of torch", file=sys.stderr)
        return 1
    output = chosen.output or _free_path(ROOT / "bench" / "results")
    if output.exists():
        print(f"error: {output} exists: two runs are never mixed; choose another --output", file=sys.stderr)
        return 1
    document = header(chosen, ceilings.versions(), ceilings.measure())
    print(json.dumps({name: document[name] for name in ("device", "torch", "copy_tb_s", "bf16_tflop_s")}), flush=True)
    torch.cuda.empty_cache()
    failed = 0
    for shape in chosen.shapes:
        failed += run(chosen, shape, document)
        _write(output, document)
    print(table(document["cases"]), f"written to {output}", sep="\n", file=sys.stderr, flush=True)
    return 1 if failed else 0


def header(chosen: argparse.Namespace, versions: dict[str, Any], measured: dict[str, float]) -> Document:
    rivals = {f"{shape} {kind}" if kind != "bf16" else shape: figures for (shape, kind), figures in RIVALS.items()}
    return {
        "date": datetime.date.today().isoformat(),
        **limits.commit(ROOT),
        **versions,
        **measured,
        "command": command(sys.argv[1:]),
        "vllm_0.24_out_tok_s": rivals,
        "cases": [],
    }


def command(words: Sequence[str]) -> str:
    """How to have the same again; where it was written to is of no use to others."""
    kept = [
        word
        for before, word in zip(["", *words], words)
        if "--output" not in (before, word) and not word.startswith("--output=")
    ]
    return " ".join(["python -m bench.gpu", *kept])


def run(chosen: argparse.Namespace, shape: str, document: Document) -> int:
    """One shape in its own processes; how many of them failed. With `--ready` the kernels that the first one compiles
    are those that the second one finds."""
    measured = {name: value for name, value in document.items() if name.endswith(("tb_s", "tflop_s"))}
    common: dict[str, Any] = {
        "shape": shape,
        "options": engine_options(chosen),
        "kinds": chosen.kinds,
        "ceilings": measured,
        "counters": chosen.counters,
        "profile": chosen.profile,
        "score": chosen.score,
        "start": "as found",
        "adapters": chosen.adapters,
    }
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if chosen.ready:
            environment["TRITON_CACHE_DIR"] = folder
            failed += _child({**common, "do": "start", "start": COLD}, environment, document)
            common["start"] = WARM
        failed += _child({**common, "do": "measure"}, environment, document)
        if chosen.score and (chosen.quantization or chosen.kv_cache_dtype):
            failed += _child({**common, "do": "divergence"}, environment, document)
    return failed


def _child(task: dict[str, Any], environment: dict[str, str], document: Document) -> int:
    """Its lines are shown as they come, and kept."""
    command = [sys.executable, "-m", "bench.gpu", "--inside", json.dumps(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith('{"engine"'):
                document["cases"].append(json.loads(line))
    if child.returncode:
        print(f"error: {task['do']} of {task['shape']} ended with status {child.returncode}", file=sys.stderr)
        document.setdefault("failures", []).append({"shape": task["shape"], "do": task["do"]})
    return int(child.returncode != 0)


def inside(task: dict[str, Any]) -> int:
    """What a process of its own does."""
    do, shape = task.pop("do"), task.pop("shape")
    from bench.gpu_case import Case, Settings, write_shape

    if do == "divergence":
        from bench.gpu_divergence import divergence

        options = task["options"]
        found = divergence(
            write_shape(shape), options.get("quantization"), options.get("kv_cache_dtype"), "bfloat16", "cuda"
        )
        print(json.dumps({"engine": "penstock", "shape": shape, **options, "kind": "divergence", **found}), flush=True)
        return 0
    case = Case(shape, Settings(**task))
    if do == "start":
        case.start()
    else:
        case.measure()
    return 0


def table(cases: Sequence[dict[str, Any]]) -> str:
    """The cases for a reader."""
    lines = [
        f"{'shape':<14}{'quant':<6}{'request set':<38}{'out tok/s':>10}{'target':>8}{'vLLM':>8}{'floor':>7}"
        f"{'step ms':>9}{'host':>7}{'idle':>7}{'batch':>7}  bound by"
    ]
    for case in cases:
        if "out_tok_s" not in case and "ready_s" not in case:
            continue
        value = case.get("out_tok_s", case.get("ready_s"))
        floor = case.get("roofline", {})
        missed = not case.get("met", True)
        name = TITLES[case["kind"]] + (f", {case['triton_cache']}" if "triton_cache" in case else "")
        lines.append(
            f"{case['shape']:<14}{case.get('quantization') or 'bf16':<6}{name:<38}{value:>10,.1f}"
            f"{_shown(case.get('target')):>8}{_shown(case.get('vllm')):>8}"
            f"{_shown(floor.get('share_of_floor'), '.0%'):>7}{_shown(case.get('ms_per_step'), '.3f'):>9}"
            f"{_shown(case.get('host_ms_per_step'), '.2f'):>7}{_shown(case.get('idle_ms_per_step'), '.2f'):>7}"
            f"{_shown(floor.get('mean_batch'), '.0f'):>7}  "
            + (f"below target: {case.get('bound_by', 'not counted')}" if missed else "")
        )
    return "\n".join(lines)


def _shown(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


def _write(path: Path, document: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _free_path(folder: Path) -> Path:
    base = f"gpu-{datetime.date.today().isoformat()}"
    names = [base, *(f"{base}-{number}" for number in range(2, 1000))]
    return next(path for name in names if not (path := folder / f"{name}.json").exists())


if __name__ == "__main__":
    sys.exit(main())
