"""Folders of models whose tokenizer or chat template attacks whoever loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidModel, InvalidRequest
from penstock.sandbox.program import load_sandboxed
from tests.llm import tiny
from tests.server.running import RunningServer

HI = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    "doubling list": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "doubling string": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}",
    "joined lists": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}"
    "{% endfor %}",
    "center": "{{ 'a' | center(4000000000) }}",
    "center method": "{{ 'a'.center(4000000000) }}",
    "ljust": "{{ 'a'.ljust(4000000000) }}",
    "format": "{{ '%4000000000d' | format(1) }}",
    "format method": "{{ '{:>4000000000}'.format(1) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(100000) }}",
    "tojson indent": "{{ [[[[1]]]] | tojson(indent=2000000000) }}",
    "range list": "{{ (range(99999) | list) * 90 | length }}",
    "slices": "{% set l = range(90000) | list %}{% for i in range(90000) %}{% set x = l[:] %}{% endfor %}",
    "replace": "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s.replace('a', 'aaaaaaaaaa') %}{% endfor %}",
    "big power": "{{ 9 ** 9 ** 9 }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long words": "{{ ('a' * 100000) | wordwrap(1) | wordwrap(1) }}{% for i in range(99999) %}{{ 'a' * 1000 }}"
    "{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


LONG = ("tojson indent", "long words", "doubling string")


def write_model(folder: Path, template: str | None = tiny.TEMPLATE, **changes: Any) -> Path:
    """A tiny model; `changes` are of its tokenizer.json."""
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(folder, template)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


DOUBLES = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
TOKENIZERS: dict[str, dict[str, Any]] = {
    "doubling normalizer": {"normalizer": {"type": "Sequence", "normalizers": DOUBLES}},
    "nested normalizer": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Sequence", "normalizers": DOUBLES[:20]},
                {"type": "Sequence", "normalizers": DOUBLES[:20]},
            ],
        }
    },
    "doubling decoder": {"decoder": {"type": "Sequence", "decoders": [*DOUBLES, {"type": "Fuse"}]}},
    "doubling after fusing": {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, *DOUBLES]}},
    "decoder of pieces": {
        "decoder": {"type": "Sequence", "decoders": [*DOUBLES, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    },
    "inserting normalizer": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 50}] * 8,
        }
    },
}


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_tokenizers_that_multiply_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path, **TOKENIZERS[name])
    with pytest.raises(InvalidModel, match="tokenizer"):
        load_sandboxed(folder, str(folder))


def test_a_tokenizer_that_explodes_on_some_text_costs_its_process_alone(tmp_path: Path) -> None:
    """A growth of 60 is let through; with it, 3 MB become 180 MB, and what is noted of each byte of them 3 GB."""
    grows: dict[str, Any] = {"normalizer": {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 60}}
    tokenizer = load_sandboxed(write_model(tmp_path, **grows), "grows")
    with pytest.raises(InvalidRequest, match="MiB for this text|places? at which|in a row"):
        tokenizer.encode("q" * 3_000_000)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    tokenizer.rest()


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
    ],
)
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(InvalidModel, match="pipe"):
        load_sandboxed(folder, str(folder))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in sorted(TEMPLATES)]
)
def test_templates_that_never_end_or_fill_memory_are_refused(tmp_path: Path, name: str) -> None:
    tokenizer = load_sandboxed(write_model(tmp_path, TEMPLATES[name]), "test")
    try:
        text = tokenizer.apply_chat_template(HI)
        assert len(text) <= 1 << 24
    except InvalidRequest as error:
        assert len(str(error)) < 500
    assert tokenizer.encode("the cat")
    tokenizer.rest()


def test_a_server_refuses_such_a_model_with_a_sentence(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **TOKENIZERS["doubling decoder"])
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        str(folder),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--port",
        "0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "lengthen a text" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_further_model_of_that_kind_leaves_no_engine(tmp_path: Path) -> None:
    good, bad = write_model(tmp_path / "good"), write_model(tmp_path / "bad", **TOKENIZERS["doubling decoder"])
    with RunningServer(str(good), "--model", f"bad={bad}", "--load-format", "dummy", "--threads", "1") as running:
        for _ in range(2):
            answer = httpx.post(
                f"{running.url}/v1/completions", timeout=120, json={"model": "bad", "prompt": [20], "max_tokens": 1}
            )
            assert answer.status_code == 500 and "lengthen a text" in answer.json()["error"]["message"]
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
        assert sum(b"penstock.api.worker" in command for command in commands) == 1
        assert sum(b"sandbox.zygote" in command for command in commands) <= 2


def test_run_refuses_such_a_model_with_a_sentence(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **TOKENIZERS["doubling normalizer"])
    command = [sys.executable, "-m", "penstock", "run", str(folder), "aaa", "--load-format", "dummy"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "lengthen a text" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", [["run", ".", "hi", "--max-tokens", "2"], ["serve", ".", "--port", "0"]])
def test_nothing_in_the_folder_is_imported(tmp_path: Path, command: list[str]) -> None:
    """Whoever stands in a model's folder runs none of its Python files."""
    folder = write_model(tmp_path / "model")
    program = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\nraise SystemExit(3)\n"
    for name in ("socket", "msgspec", "random", "types", "penstock"):
        (folder / f"{name}.py").write_text(program)
    penstock = Path(sys.executable).parent / "penstock"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(penstock), *command, "--load-format", "dummy", "--threads", "1"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "listening on" in line:
            process.terminate()
    process.stdout.close()
    assert process.wait(60) == 0, said
    assert not (tmp_path / "ran").exists()


def test_others_are_served_while_a_template_runs_wild(tmp_path: Path) -> None:
    template = "{% if 'wild' in messages[0].content %}" + TEMPLATES["slices"] + "{% endif %}" + tiny.TEMPLATE
    folder = write_model(tmp_path, template)
    with (
        RunningServer(str(folder), "--load-format", "dummy", "--threads", "1") as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        wild = {"messages": [{"role": "user", "content": "wild"}], "max_tokens": 2}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=wild, timeout=1)
        for _ in range(3):
            assert client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2}).status_code == 200
