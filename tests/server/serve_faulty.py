"""`penstock serve` over the faulty worker, for tests."""

from __future__ import annotations

import sys

from penstock.server.config import ServerConfig
from penstock.server.engines import process
from penstock.server.http.log import set_up_log
from penstock.server.run import serve

if __name__ == "__main__":
    model = sys.argv[1]
    set_up_log("text")
    command = (sys.executable, "-m", "tests.server.faulty_worker")
    assert command != process.WORKER
    sys.exit(serve({"tiny": model}, {"load_format": "dummy", "threads": 1}, ServerConfig(port=0), command))
