"""Speed of a product with every packed format beside Q4_0 and Q8_0, on a CPU.

`python -m bench.storages` multiplies one row by a matrix of random codes in each format, in turns on one thread, and
prints the CPU seconds of each over those of Q4_0 and Q8_0, as the median of the turns. `Q4_K 4 KiB` is without huge
pages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from penstock.ops import FORMATS, Format, OpTable, PackedWeight, pack_panels, pages
from penstock.ops.cpu.runtime.threads import set_num_threads

SEED = 0


def make_random(format: Format, num_out: int, width: int) -> PackedWeight:
    """Make a weight of random codes, its scales small numbers."""
    generator = torch.Generator().manual_seed(SEED)
    weight = PackedWeight.empty(format, num_out, width)
    for plane in (weight.codes, weight.high):
        plane.random_(generator=generator)
    for plane in (weight.scales, weight.supers):
        plane.fill_(1)
    return weight


def _multiply(ops: OpTable, weight: PackedWeight, x: Tensor) -> Tensor:
    return ops.packed_linear(x, (weight,), 8)


def time_product(multiply: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """Return the CPU seconds of one product."""
    began = time.process_time()
    for _ in range(repeats):
        multiply(x)
    return (time.process_time() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    set_num_threads(1)
    ops = OpTable("cpu")
    x = torch.randn(args.rows, args.inputs, generator=torch.Generator().manual_seed(SEED))
    weights = {name: make_random(format, args.outputs, args.inputs) for name, format in FORMATS.items()}
    products: dict[str, Callable[[Tensor], Tensor]] = {
        name: partial(_multiply, ops, weight) for name, weight in weights.items()
    }
    with patch.object(pages, "MIN_BYTES", 1 << 60):
        small = make_random(FORMATS["Q4_K"], args.outputs, args.inputs)
    products["Q4_K 4 KiB"] = partial(_multiply, ops, small)
    wide = pack_panels(torch.zeros(args.outputs, args.inputs, dtype=torch.bfloat16))
    products["bfloat16"] = lambda x: ops.linear(x, wide, args.outputs)
    times: dict[str, list[float]] = {name: [] for name in products}
    for turn in range(args.turns + 1):
        for name, multiply in products.items():
            seconds = time_product(multiply, x, 4)
            if turn:  # the first warms up
                times[name].append(seconds)
    print(f"{'format':10} {'bytes/value':>11} {'ms':>7} {'× Q4_0':>7} {'× Q8_0':>7}")
    for name, found in times.items():
        weight = weights.get(name.split()[0])
        num_bytes = weight.num_bytes / (args.outputs * args.inputs) if weight else 2.0
        ratios = [statistics.median(a / b for a, b in zip(found, times[base])) for base in ("Q4_0", "Q8_0")]
        print(f"{name:10} {num_bytes:11.3f} {1e3 * statistics.median(found):7.2f} {ratios[0]:7.2f} {ratios[1]:7.2f}")


if __name__ == "__main__":
    main()
