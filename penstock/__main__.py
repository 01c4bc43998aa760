"""The command `penstock`, also as `python -m penstock`."""

from __future__ import annotations

import sys


def main() -> int:
    from penstock.host.interrupts import final_interrupts

    with final_interrupts():
        from penstock.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
