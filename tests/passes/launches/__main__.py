"""Record the kernels of steps, show them, or compare them with a recorded list."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.passes.launches.golden import differences, kernels_of, read, record_all, write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["record", "compare", "show"])
    parser.add_argument("golden", type=Path, help="the stored lists, *.json or *.json.gz")
    parser.add_argument("beginnings", nargs="*", default=[""], help="of the keys: cpu/, gpu/LlamaForCausalLM.0/int4")
    parser.add_argument("--with-flow", action="store_true", help="compare which memory is given, too")
    parser.add_argument("--other", type=Path, help="compare with these stored lists instead of recording anew")
    args = parser.parse_args()
    beginnings = tuple(args.beginnings)
    if args.work == "record":
        write(record_all(beginnings), args.golden)
        return 0
    expected = {key: value for key, value in read(args.golden).items() if key.startswith(beginnings)}
    if args.work == "show":
        for key in expected:
            print(key, *kernels_of(key, expected, args.with_flow), sep="\n    ")
        return 0
    found = read(args.other) if args.other else record_all(beginnings)
    found = {key: value for key, value in found.items() if key.startswith(beginnings)}
    told = differences(expected, found, args.with_flow)
    missing = [key for key in expected if key not in found]
    for key, how in told.items():
        print(key, how, sep="\n")
    print(f"{len(found)} steps, {len(told)} differ, {len(missing)} are missing", *missing[:10])
    return 1 if told or missing else 0


if __name__ == "__main__":
    sys.exit(main())
