"""Ops by themselves on a GPU: `python -m bench.ops --device cuda`.

Each case is recorded as a graph of many launches over different inputs, larger together than the GPU's cache, and
replayed: the median of several replays, beside the copy bandwidth and matrix rate that the device has in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ceilings, limits
from bench.process import ROOT

OPS = (
    "rms_norm",
    "qkv_write",
    "activation",
    "attention",
    "qkv_attention",
    "product",
    "fp8_product",
    "int_product",
    "sample",
)
SHAPES = ("8b", "0.6b")
REPLAYS = 5
LEAST_S, MOST_S = 2e-3, 12e-3  # of one replay


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ops", description="Time ops by themselves, beside what the device could do at best."
    )
    parser.add_argument("--device", choices=("cuda",), default="cuda", help="bench.cpu measures those of CPUs")
    parser.add_argument("--op", dest="ops", action="append", choices=OPS, help="may be repeated (default: all)")
    parser.add_argument("--shape", dest="shapes", action="append", choices=SHAPES, help="as --op")
    parser.add_argument("--alone", action="store_true", help="leave out other ways to compute the same")
    parser.add_argument("--output", type=Path, help="the JSON file (default: bench/results/ops-DATE.json)")
    chosen = parser.parse_args(words)
    chosen.ops, chosen.shapes = chosen.ops or list(OPS), chosen.shapes or list(SHAPES)
    return chosen


def num_launches(num_calls: int, seconds: float) -> int:
    """In one graph: each input once, more often where that is over at once, fewer where it takes long."""
    wanted = num_calls * max(1, round(LEAST_S / max(1e-9, num_calls * seconds)))
    return max(1, min(wanted, int(MOST_S / max(1e-9, seconds))))


def time_calls(calls: Sequence[Any]) -> float:
    """Seconds of one call."""
    import torch

    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    count = num_launches(len(calls), min(ceilings.fastest(calls[0], 2), MOST_S))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(count):
            calls[at % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return float(statistics.median(times))


def figures(case: Any, seconds: float, others: dict[str, float | None], measured: dict[str, float]) -> dict[str, Any]:
    """A case's time beside the device's ceilings."""
    rate = measured.get("fp8_tflop_s" if case.is_fp8 else "bf16_tflop_s") or measured["bf16_tflop_s"]
    moved, computed = case.num_bytes / seconds / 1e12, case.num_ops / seconds / 1e12
    floor = max(case.num_bytes / measured["copy_tb_s"], case.num_ops / rate) / 1e12
    return {
        "op": case.op,
        "shape": case.shape,
        "case": case.name,
        "us": round(seconds * 1e6, 2),
        "tb_s": round(moved, 3),
        "share_of_copy": round(moved / measured["copy_tb_s"], 3),
        "tflop_s": round(computed, 1),
        "share_of_rate": round(computed / rate, 3),
        "share_of_floor": round(floor / seconds, 3),
        "others_us": {name: None if value is None else round(value * 1e6, 2) for name, value in others.items()},
    }


def line(row: dict[str, Any] | None = None) -> str:
    """A line of the table; without a row its head."""
    if row is None:
        return (
            f"{'op':<14}{'shape':<6}{'case':<38}{'µs':>10}{'TB/s':>7}{'':>6}{'TFLOP/s':>9}{'':>6}{'floor':>7}"
            "  others, µs (our speed in theirs)"
        )
    others = ", ".join(
        f"{name} failed" if value is None else f"{name} {value} ({value / row['us']:.2f})"
        for name, value in row["others_us"].items()
    )
    return (
        f"{row['op']:<14}{row['shape']:<6}{row['case']:<38}{row['us']:>10}{row['tb_s']:>7.2f}"
        f"{row['share_of_copy']:>6.0%}{row['tflop_s']:>9.1f}{row['share_of_rate']:>6.0%}{row['share_of_floor']:>7.0%}"
        f"  {others}"
    )


def run(chosen: argparse.Namespace, document: dict[str, Any]) -> None:
    import torch

    import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
    from bench.op_cases import SHAPES, Maker

    device: Any = torch.cuda.get_device_properties(0)
    cache_bytes = getattr(device, "L2_cache_size", 0) or 60 << 20
    print(line(), flush=True)
    for op in chosen.ops:
        for shape in chosen.shapes:
            maker = Maker(SHAPES[shape], chosen.device, cache_bytes, device.multi_processor_count)
            for case in getattr(maker, op)():
                try:
                    seconds = time_calls(case.calls)
                except Exception as error:  # one kernel that fails must not hide the others
                    document["failures"].append(f"{op} {shape} {case.name}: {type(error).__name__}: {error}"[:300])
                    print(f"{op:<14}{shape:<6}{case.name:<38} failed: {error}"[:200], flush=True)
                    continue
                others = {} if chosen.alone else {name: _tried(calls) for name, calls in case.others.items()}
                document["cases"].append(figures(case, seconds, others, document))
                print(line(document["cases"][-1]), flush=True)
            del maker
            torch.cuda.empty_cache()


def _tried(calls: Sequence[Any]) -> float | None:
    """None where the library has no such kernel."""
    try:
        return time_calls(calls)
    except Exception:
        return None


def main(words: Sequence[str] | None = None) -> int:
    chosen = parse(words)
    import torch

    if not torch.cuda.is_available():
        print("error: torch sees no GPU: run this on a machine with one, with a CUDA build of torch", file=sys.stderr)
        return 1
    output = chosen.output or ROOT / "bench" / "results" / f"ops-{datetime.date.today().isoformat()}.json"
    begun = time.perf_counter()
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        **limits.commit(ROOT),
        **ceilings.versions(),
        **ceilings.measure(),
        "cases": [],
        "failures": [],
    }
    print(
        f"{document['device']}: copies {document['copy_tb_s']} TB/s, reads {document['read_tb_s']} TB/s, multiplies "
        f"{document['bf16_tflop_s']} TFLOP/s in bf16, {document.get('fp8_tflop_s', 'none')} in fp8",
        flush=True,
    )
    gc.freeze()  # every recording looks through all that is not frozen
    with torch.inference_mode():
        run(chosen, document)
    document["s"] = round(time.perf_counter() - begun, 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(document['cases'])} cases in {document['s']} s, written to {output}", file=sys.stderr)
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
