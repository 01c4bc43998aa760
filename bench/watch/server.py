"""`penstock serve` over the waiting engine: `python -m bench.watch.server MODEL`."""

from __future__ import annotations

import sys

from penstock.server.config import ServerConfig
from penstock.server.http.log import set_up_log
from penstock.server.run import serve


def main() -> int:
    set_up_log("text")
    command = (sys.executable, "-m", "bench.watch.worker")
    return serve({"waiting": sys.argv[1]}, {}, ServerConfig(port=0, access_log=False), command)


if __name__ == "__main__":
    sys.exit(main())
