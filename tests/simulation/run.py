"""Simulate for as long as you like: `python -m tests.simulation.run --steps 100000000`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count

from tests.simulation.world import simulate


def attempt(seed: int, steps: int) -> tuple[int, Counter[str], str]:
    """One world: its seed, what happened, and the error that ended it."""
    try:
        return seed, simulate(seed, steps), ""
    except Exception:
        return seed, Counter(), traceback.format_exc()


def worlds(first: int, steps: int, workers: int) -> Iterator[tuple[int, Counter[str], str]]:
    """Worlds of consecutive seeds, as they end; without end."""
    seeds = count(first)
    if workers == 1:
        yield from (attempt(seed, steps) for seed in seeds)
    with ProcessPoolExecutor(workers) as pool:
        running: set[Future[tuple[int, Counter[str], str]]] = set()
        try:
            while True:
                running |= {pool.submit(attempt, next(seeds), steps) for _ in range(2 * workers - len(running))}
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world")
    parser.add_argument("--world-steps", type=int, default=600, help="steps of load in each world")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worlds simulated side by side")
    options = parser.parse_args(arguments)
    from tqdm import tqdm

    census: Counter[str] = Counter()
    with tqdm(total=options.steps, unit=" steps", unit_scale=True) as bar:
        for seed, world, error in worlds(options.seed, options.world_steps, options.workers):
            if error:
                bar.write(
                    f"{error}\nseed {seed} failed; to see it again:\n  python -m tests.simulation.run "
                    f"--workers 1 --steps 1 --seed {seed} --world-steps {options.world_steps}",
                    file=sys.stderr,
                )
                return 1
            census.update(world)
            bar.update(world["num_steps"])
            bar.set_postfix(seed=seed)
            if census["num_steps"] >= options.steps:
                break
    for name, value in sorted(census.items()):
        print(f"{name:28}{value:>14,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
