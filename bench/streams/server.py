"""`penstock serve` over the counting engine: `python -m bench.streams.server MODEL`.

With STREAMS_TRACE the stations of a request are noted, with STREAMS_PROFILE its CPU profile is written there on exit.
"""

from __future__ import annotations

import cProfile
import os
import sys

from bench.streams.trace import PATH, stamp_calls
from penstock.server.config import ServerConfig
from penstock.server.http.log import set_up_log
from penstock.server.run import serve

PROFILE = os.environ.get("STREAMS_PROFILE")


def trace_stations() -> None:
    from penstock.server.connections.connection import Connection
    from penstock.server.engines.engine import RemoteEngine
    from penstock.server.engines.process import EngineProcess
    from penstock.server.http import context
    from penstock.server.state import Server

    stamp_calls(Connection, "data_received", "request arrives")
    stamp_calls(context, "decode", "body decoded", after=True)
    stamp_calls(Server, "generate", "prompt encoded")
    stamp_calls(RemoteEngine, "submit", "request made")
    stamp_calls(EngineProcess, "send", "command sent", after=True)
    stamp_calls(RemoteEngine, "_handle", "delta arrives")


def main() -> int:
    set_up_log("text")
    if PATH:
        trace_stations()
    command = (sys.executable, "-m", "bench.streams.worker")
    return serve({"counting": sys.argv[1]}, {}, ServerConfig(port=0, access_log=False), command)


if __name__ == "__main__":
    if PROFILE:
        profile = cProfile.Profile()
        status = profile.runcall(main)
        profile.dump_stats(PROFILE)
        sys.exit(status)
    sys.exit(main())
