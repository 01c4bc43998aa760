"""`penstock top`: the live view in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.cli import main
from penstock.commands.top.feed import LookLost, LookRefused, read_looks
from penstock.commands.top.screen import BLOCKS, Screen, draw_sparks, share_out
from tests.cli.conftest import Terminal
from tests.llm import tiny
from tests.server.running import RunningServer, free_port

STATES = ["prefill", "decode", "queued", "preempted", "grammar", "restart"]


def make_row(number: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-4d187e17a3b65b3efa69{number:04d}",
        "index": number % 2,
        "tenant": "alice",
        "state": STATES[number % len(STATES)],
        "prompt_tokens": 432,
        "computed_tokens": 20 * number,
        "cached_tokens": 16 * number,
        "output_tokens": 3 * number,
        "max_tokens": 60,
        "draft_tokens": 7 * number,
        "accepted_tokens": 5 * number,
        "preemptions": number % 3,
        "age_s": 1.5 * number,
    }


def make_look(num_rows: int = 12, name: str = "smollm2") -> dict[str, Any]:
    blocks = {"num": 512, "block_size": 16, "free": 300, "held": 100, "cached": 90, "shared": 22, "evicted": 7}
    rates = {"prompt_tokens_per_s": 1294.6, "generation_tokens_per_s": 88.9, "ttft_ms": 40.1, "tpot_ms": 11.3}
    model = {
        "name": name,
        "state": "ready",
        "restarts": 2,
        "age_s": 3.0,
        "rates": {**rates, "hit_rate": 0.8, "step_ms": None},
        "num_rows": num_rows,
        "rows": [make_row(number) for number in range(num_rows)],
        "queue": [{"tenant": "bob", "requests": 3, "tokens": 1200}],
        "blocks": blocks,
    }
    idle = {"name": "idle", "state": "unloaded", "restarts": 0, "rates": None, "num_rows": 0}
    return {"time": 1795042466.4, "models": [model, {**idle, "rows": [], "queue": [], "blocks": None}], "ended": []}


def draw(screen: Screen, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(screen.render(width, height))
    return captured.get().splitlines()


@pytest.mark.parametrize("size", [(160, 50), (100, 24), (80, 16), (50, 12), (24, 8), (8, 4)])
def test_it_fits_terminals_of_all_sizes(size: tuple[int, int]) -> None:
    width, height = size
    screen = Screen("http://127.0.0.1:8000")
    for _ in range(5):
        screen.take(make_look(64))
    screen.trouble = "nothing answers at http://127.0.0.1:8000: the server is not running; trying again"
    lines = draw(screen, *size)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= max(height, 24)  # what is about models stays, rows go
    text = "\n".join(lines)
    if width >= 50:
        assert "nothing answers" in text and "more" in text and "idle" in text and "2 restarts" in text
    if width >= 100:
        assert "bob 3 requests (1200 prompt tokens)" in text and "88.9 tok/s" in text and "held 100" in text
    if width == 160:
        assert "chatcmpl-4d187e17a3b65b3efa690001#1" in text and "5/7" in text and "queued" in text


def test_names_cannot_steer_the_terminal() -> None:
    look = make_look(1, "bad\x1b[2J\x07[bold]\u202e")
    look["models"][0]["rows"][0] |= {"id": "x\x1b]0;t\x07yyyyyyyyyyyyyyyy", "tenant": "[red]\r\n\x9b", "state": "\x1b"}
    screen = Screen("http://h\x1b[2J")
    screen.take(look)
    text = "\n".join(draw(screen, 160, 40))
    assert not any(char in text for char in "\x1b\x07\r\x9b\u202e")
    assert "[bold]" in text and "[red]" in text  # no markup either


def test_cells_are_shared_out() -> None:
    assert share_out([50, 50], 10, 100) == [5, 5]
    assert share_out([1, 999], 10, 1000) == [1, 9]
    assert share_out([0, 0, 7], 3, 7) == [0, 0, 3]
    for counts in ([1, 1, 1, 1], [1000, 1, 1, 1], [0, 3, 0, 1], [333, 333, 333, 1]):
        for room in (4, 7, 50, 500):
            cells = share_out(counts, room, sum(counts))
            assert sum(cells) == room and len(cells) == len(BLOCKS)
            assert all((cell > 0) == (count > 0) for cell, count in zip(cells, counts))
    assert draw_sparks([0.0, 0.0]) == "▁▁" and draw_sparks([0, 5, 10]) == "▁▅█"


def test_a_stream_that_breaks_off_is_lost_and_no_news() -> None:
    """An event that was cut, a length that was not kept, and what is no event at all."""
    whole = b"data: " + json.dumps(make_look()).encode() + b"\n\n"
    for body, number, error in (
        (whole + whole[:100], 1, LookLost),
        (whole, 1, LookLost),
        (b'data: {"models": 3}\n\n', 0, LookRefused),
        (b"data: []\n\n", 0, LookRefused),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b" % (len(body) + 9, body)
            thread = threading.Thread(target=send_once, args=(listening, answer))
            thread.start()
            looks = []
            with pytest.raises(error):
                for look in read_looks(f"http://127.0.0.1:{listening.getsockname()[1]}", None):
                    looks.append(look)
                raise LookLost("it ended")
            thread.join()
            assert len(looks) == number


def send_once(listening: socket.socket, answer: bytes) -> None:
    connection = listening.accept()[0]
    with connection:
        connection.recv(4096)
        connection.sendall(answer)


@pytest.fixture
def served(tmp_path: Path, home: Path) -> Iterator[RunningServer]:
    tiny.write_config(tmp_path / "tiny", vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(tmp_path / "tiny")
    arguments = [str(tmp_path / "tiny"), "--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny"]
    with RunningServer(*arguments, "--admin-key", "root") as running:
        yield running


def test_one_look(served: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": list(range(20, 60)), "max_tokens": 3900, "ignore_eos": True}
    asked = {"url": f"{served.url}/v1/completions", "json": body, "timeout": 120}
    thread = threading.Thread(target=httpx.post, kwargs=asked)
    assert main(["top"]) == 1
    assert "give its admin key with --api-key" in capsys.readouterr().err
    thread.start()
    assert main(["top", "--api-key", "root", "--json"]) == 0  # it finds the server, as ps does
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["name"].endswith("tiny") and model["rates"]["generation_tokens_per_s"] is not None
    assert main(["top", "--url", served.url, "--api-key", "root"]) == 0  # not a terminal: one look
    out = capsys.readouterr().out
    assert "blocks" in out and "ready" in out and "\x1b" not in out
    thread.join()
    command = [sys.executable, "-m", "penstock", "top", "--api-key", "root"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "ready" in done.stdout and not done.stderr


def test_what_cannot_be_watched(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    for arguments, words in (
        ([], "no server runs on this machine: start one with penstock serve"),
        (["--url", "localhost"], "is not a URL"),
        (["--url", f"http://127.0.0.1:{port}"], "nothing answers at"),
        (["--url", "http://127.0.0.1:99999999"], "99999999"),
    ):
        assert main(["top", *arguments]) == 1
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_it_follows_a_server_that_is_killed_and_comes_back(
    served: RunningServer, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal("top", "--api-key", "root")
    shown.expect("penstock top", "ready", "blocks")
    fcntl.ioctl(shown._master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
    served.process.send_signal(signal.SIGKILL)
    shown.expect("trying")
    assert max(map(len, shown.screen.rsplit("penstock top", 1)[1].splitlines())) <= 50  # it follows the terminal's size
    arguments = [*served.arguments[:-2], "--port", "0"]  # at another port
    again = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        shown._read = len(shown.screen)
        shown.expect("tiny", "ready")
        shown.type("q")
        assert shown.status() == 0
        assert shown.raw.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in shown.raw  # the screen is as it was
    finally:
        again.send_signal(signal.SIGTERM)
        again.wait(60)
