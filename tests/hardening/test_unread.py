"""A client that asks for much and reads none of it."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

from tests.server.running import RunningServer

SOON = (
    "import sys, penstock.server.connections.connection as module; module.UNREAD_S = 1.0; "
    "from penstock.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
)
BODIES = {
    "/v1/completions": {"prompt": "a", "n": 8, "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 5},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "n": 8,
        "max_tokens": 3500,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 5,
    },
}


def test_it_is_aborted_and_gives_its_blocks_back(tiny_model: Path) -> None:
    command = (sys.executable, "-c", SOON)
    with RunningServer(str(tiny_model), "--load-format", "dummy", "--threads", "1", command=command) as server:
        host, port = server.url.removeprefix("http://").split(":")
        lines = []
        for path, body in BODIES.items():
            line = socket.socket()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect((host, int(port)))
            content = json.dumps(body).encode()
            line.sendall(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
            )
            lines.append(line)
        server.wait_for("read nothing of its response", 90)
        end = time.monotonic() + 90
        while True:
            stats = server.stats()
            if stats["num_aborted"] >= 8 * len(BODIES) and not stats["num_used_blocks"] and not stats["num_running"]:
                break
            assert time.monotonic() < end, stats
            time.sleep(0.2)
        for line in lines:
            line.close()
