"""Servers compared: started, taking turns, ranked."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import serving, serving_compare
from bench.load.contest import summarize as compare
from bench.load.figures import Limits, summarize
from bench.load.servers import read_entries
from tests.bench.samples import made

Document = dict[str, Any]
EXAMPLE = Path(serving.__file__).parent / "servers.example.toml"


def turn(server: str, speed: float, ttft_s: float) -> Document:
    figures = summarize([made(0.0, ttft_s, 11 / speed)], Limits())
    return {"server": server, "workload": "w", "phases": [{"figures": {}}, {"figures": figures}]}


def test_ratios_come_from_medians_and_point_the_right_way() -> None:
    turns = [
        turn("a", 20.0, 0.1),
        turn("a", 22.0, 0.2),
        turn("a", 900.0, 0.005),
        turn("b", 11.0, 0.4),
        turn("b", 10.0, 0.5),
        turn("b", 1.0, 0.6),
    ]
    first, second = compare(turns, "a")
    assert first["medians"]["tokens/s"] == pytest.approx(22.0) and first["first_is_better"] == {}
    assert second["first_is_better"]["tokens/s"] == pytest.approx(2.2)
    assert second["first_is_better"]["TTFT mean, s"] == pytest.approx(5.0)
    assert (second["num_rounds"], second["num_not_ok"]) == (3, 0)


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from tests.bench.chat_server import Answer, ChatServer, asyncio
start = asyncio.start_server
asyncio.start_server = lambda serve, host, port: start(serve, host, int(sys.argv[1]))
with ChatServer(lambda index, body: Answer(body["max_tokens"])):
    time.sleep(60)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_servers_are_started_take_turns_and_are_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(EXAMPLE.parent.parent)))
    ports = [free_port(), free_port()]
    tables = "".join(
        f'[[server]]\nname = "{name}"\nurl = "http://127.0.0.1:{port}"\n'
        f"command = ['{sys.executable}', '{program}', '{port}']\n"
        for name, port in zip("ab", ports)
    )
    tables += (
        '[[server]]\nname = "gone"\nurl = "http://127.0.0.1:1"\ncommand = "no-such-program"\n'
        f'[[server]]\nname = "ends"\nurl = "http://127.0.0.1:{free_port()}"\n'
        f"command = ['{sys.executable}', '-c', 'raise SystemExit(\"no model\")']\n"
    )
    (tmp_path / "servers.toml").write_text(tables)
    output = tmp_path / "result.json"
    status = serving_compare.main(
        [
            str(tmp_path / "servers.toml"),
            "--requests",
            "2",
            "--output-len",
            "2",
            "--workload",
            "burst-new-prefix",
            "--rounds",
            "2",
            "--pause",
            "0",
            "--output",
            str(output),
        ]
    )
    document = json.loads(output.read_text())
    assert status == 1 and document["complete"]  # one of them did not start
    assert [(turn["round"], turn["server"]) for turn in document["turns"]] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert document["absent"] == {"gone": "no-such-program is not installed"}
    [failure] = document["failures"]
    assert failure["server"] == "ends" and "no model" in failure["error"]
    seeds = [turn["phases"][0]["seed"] for turn in document["turns"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    out = capsys.readouterr().out
    assert "How many times better a is" in out and "| than b |" in out and "gone was skipped" in out
    for port in ports:
        with socket.socket() as gone:
            assert gone.connect_ex(("127.0.0.1", port)) != 0


def test_the_example_names_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MODEL_GGUF", "MODEL_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    entries, absent = read_entries(EXAMPLE)
    assert entries == [] and absent["penstock"] == "penstock is not installed"
    assert "MODEL_GGUF is not set" in absent["llama-server"] and "MODEL_FOLDER is not set" in absent["vllm"]
    for name in ("penstock", "llama-server", "vllm"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("MODEL_GGUF", "m.gguf")
    monkeypatch.setenv("MODEL_FOLDER", "folder")
    entries, absent = read_entries(EXAMPLE)
    assert [entry.name for entry in entries] == ["penstock", "llama-server", "vllm"] and absent == {}
    assert "m.gguf" in entries[1].command and entries[0].health == "/health/ready"
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[server]]\nname = "a"\nurl = "http://127.0.0.1:1"\ncomand = "x"\n')
    with pytest.raises(ValueError, match="comand is unknown"):
        read_entries(wrong)
