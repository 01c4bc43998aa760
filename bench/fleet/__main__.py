"""Count the prompt tokens that four replicas compute: `python -m bench.fleet`.

Nothing is timed: dispatcher, scheduler and cache are the server's own, the device only counts. Columns: prompt tokens
asked, computed by one engine with the memory and rows of all four, and by four replicas; the ratio to one engine, to
replicas in turn and to the least busy one; the virtual time to the end, and until a request's first token in the mean
and for the slowest twentieth, over those of the least busy; and the busiest replica's time over the mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from bench.fleet.engines import FleetModel, least_busy, take_turns
from bench.fleet.workloads import WORKLOADS

SIZE = 4
CACHE_TOKENS = 16_384  # of each replica
NUM_ROWS = 8
GAPS = {"idle": 4000.0, "busy": 150.0, "flooded": 20.0}  # tokens of time between arrivals


def measure(workload: str, gap: float, seed: int) -> dict[str, float]:
    """Return computed prompt tokens by rule."""
    make, count = WORKLOADS[workload]
    fleets: dict[str, Callable[[], FleetModel]] = {
        "one big cache": lambda: FleetModel(1, SIZE * CACHE_TOKENS, SIZE * NUM_ROWS),
        "prefix": lambda: FleetModel(SIZE, CACHE_TOKENS, NUM_ROWS),
        "round robin": lambda: FleetModel(SIZE, CACHE_TOKENS, NUM_ROWS, take_turns()),
        "least busy": lambda: FleetModel(SIZE, CACHE_TOKENS, NUM_ROWS, least_busy),
    }
    found = {}
    for name, start in fleets.items():
        fleet = start()
        make(fleet, seed, gap, count)
        fleet.run()
        found[name] = float(fleet.num_computed)
        waits = sorted(fleet.waits.values())
        found[f"{name}: end"] = fleet.now
        found[f"{name}: wait"] = sum(waits) / len(waits)
        found[f"{name}: slowest"] = waits[len(waits) * 19 // 20]
        found[f"{name}: imbalance"] = fleet.imbalance
    found["asked"] = float(fleet.num_prompt)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        for load, gap in GAPS.items():
            sums: dict[str, float] = {}
            for seed in range(options.seeds):
                for name, value in measure(workload, gap, seed).items():
                    sums[name] = sums.get(name, 0.0) + value
            rows.append({"workload": workload, "load": load, **sums})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    titles = ("asked", "one cache", "prefix", "/ one", "/ turns", "/ least", "time", "wait", "slowest", "imbalance")
    print(f"{'workload':10}{'load':9}" + "".join(f"{title:>10}" for title in titles))
    for row in rows:
        one, own = row["one big cache"], row["prefix"]
        cells = f"{row['workload']:10}{row['load']:9}{row['asked']:>10.0f}{one:>10.0f}{own:>10.0f}"
        ratios = f"{own / one:>10.3f}{own / row['round robin']:>10.3f}{own / row['least busy']:>10.3f}"
        times = (row[f"prefix: {name}"] / row[f"least busy: {name}"] for name in ("end", "wait", "slowest"))
        cells += ratios + "".join(f"{value:>10.2f}" for value in times)
        print(cells + f"{row['prefix: imbalance'] / options.seeds:>10.2f}")


if __name__ == "__main__":
    main()
