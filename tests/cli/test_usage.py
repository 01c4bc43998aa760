"""What the command line says about itself, and how its failures look."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.cli import COMMANDS, main
from penstock.commands.flags.groups import MACHINES
from penstock.commands.flags.options import SERVING
from penstock.config import EngineConfig
from penstock.ops import cpu

HELP = """\
Usage: penstock COMMAND [ARGS]...; `penstock COMMAND --help` explains one

Commands:
  run         Answer one prompt; without one, at a terminal, chat.
  chat        Chat with a model; /help lists the commands.
  serve       Serve models by OpenAI's API (default: smollm2).
  route       Route requests to several servers, by what their caches hold.
  ps          Show the servers on this machine and what they run.
  stop        Stop a server after it finishes its answers.
  top         Watch what a server does now.
  run-batch   Answer a file of requests in OpenAI's batch format.
  pull        Fetch models without running them.
  list        Show the models on this machine.
  rm          Delete models from this machine.
  info        Describe a model; without one, this installation.
  merge       Write a model with LoRA adapters in its weights.
  plan        Forecast a model's memory and speed, from its headers alone.
  verify      Check this installation's arithmetic with a model.
  tune        Find settings for a workload by running it.
  perplexity  Measure how well a model predicts a text.
  quantize    Make a smaller model of one, and report what it loses.
  quality     Measure what model B loses against model A.
  completion  Print a script that completes commands in bash, zsh or fish.
  bench       Measure a model's speed on this machine.
"""


def test_help_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == HELP
    assert len(HELP.splitlines()) <= 24


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == HELP


def test_help_imports_nothing_heavy() -> None:
    """Under 0.3 s on a laptop: only the light imports are a matter of this program, so those are held."""
    code = (
        "import sys; from penstock.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'rich', 'tqdm', 'tokenizers', 'safetensors', 'jinja2', 'huggingface_hub'}; "
        "heavy |= {'prompt_toolkit', 'markdown_it'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr.strip()) == (HELP, "[]")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.startswith("penstock ")


@pytest.mark.parametrize("command", [["run"], ["chat"], ["perplexity"], ["bench", "throughput"], ["bench", "latency"]])
def test_every_engine_option_is_a_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    left_out = {*SERVING, *MACHINES, *(() if command[0] == "bench" else ("skip_tokenizer_init",))}
    for option in fields(EngineConfig):
        assert (f"--{option.name.replace('_', '-')}" in text) == (option.name not in left_out), option.name


@pytest.mark.parametrize("command", ["run", "chat", "serve", "perplexity", "run-batch"])
def test_help_is_short_and_help_all_explains(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, most in ((80, 52), (120, 46)):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([command, "--help"]) == 0
        short = capsys.readouterr().out
        assert len(short.splitlines()) <= most, width
    assert "tokens per KV cache block" not in short
    assert main([command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert "list[" not in short + whole, "a type of Python's is no help"
    assert "tokens per KV cache block" in whole and "--swap-space" not in whole, "vLLM's own flags stay hidden"


def test_what_help_all_explains_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that names flags alone in its help has the flag that explains them."""
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        if "(--help-all explains)" in capsys.readouterr().out:
            assert main([command, "--help-all"]) == 0, command
            assert "(--help-all explains)" not in capsys.readouterr().out, command


def test_completion(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "mine.gguf").touch()

    def complete(*typed: str) -> list[str]:
        assert main(["completion", "words", "--", *typed]) == 0
        return capsys.readouterr().out.splitlines()

    assert complete("r") == ["rm", "route", "run", "run-batch"] and complete("bench", "l") == ["latency"]
    assert complete("run", "") == ["gemma3-270m", "mine.gguf", "smollm2"] and complete("rm", "") == ["mine.gguf"]
    assert complete("serve", "--max-num-b") == ["--max-num-batched-tokens"]
    assert complete("run", "mine", "--kv-cache-dtype", "in") == ["int4", "int8"] and complete("nothing", "") == []
    assert complete("serve", "--swap") == [] and complete("run", "--config") == []
    assert main(["completion", "tcsh"]) == 1
    assert "name one of bash, zsh, fish" in capsys.readouterr().err


def test_completion_in_bash(home: Path) -> None:
    script = f"""
        penstock() {{ {shlex.quote(sys.executable)} -m penstock "$@"; }}
        source <(penstock completion bash)
        COMP_WORDS=(penstock run smol); COMP_CWORD=2; _penstock; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("smollm2\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["run"],
        ["run", "smollm2", "--no-such-flag"],
        ["run", "smollm2", "hi", "--max-tokens", "many"],
        ["bench", "sideways"],
        ["rm"],
    ],
)
def test_wrong_usage_is_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.endswith("--help)\n") and err.count("\n") == 1


def test_serving_two_models_by_position_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "smollm2", "gemma3-270m"]) == 2
    error = capsys.readouterr().err
    assert "(gemma3-270m): name each further model with --model" in error and error.count("\n") == 1


def failing(tmp_path: Path) -> list[tuple[list[str], str]]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(8))
    (tmp_path / "weights.bin").write_bytes(b"pickle")
    missing = str(tmp_path / "missing.gguf")
    return [
        (["run", missing, "hi"], f"no such file or folder: {missing}"),
        (["run", str(tmp_path / "empty"), "hi"], f"{tmp_path / 'empty'}"),
        (["run", str(tmp_path / "short.gguf"), "hi"], f"{tmp_path / 'short.gguf'}"),
        (["run", str(tmp_path / "weights.bin"), "hi"], f"{tmp_path / 'weights.bin'}"),
        (["info", str(tmp_path / "short.gguf")], f"{tmp_path / 'short.gguf'}"),
        (["run", "nonsense", "hi"], "no model named 'nonsense'"),
        (["run", "smollm2", "hi"], "cannot fetch smollm2"),
        (["run", "org/name", "hi"], "the Hugging Face hub cannot be reached"),
        (["run", "smollm2", "  "], "the prompt is empty"),
        (["run", "smollm2", "hi", "--temperature=-1"], "temperature=-1.0 is out of range: it must be 0 or more"),
        (["run", "smollm2", "hi", "--temperature=nan"], "temperature=nan is out of range"),
        (["run", "smollm2", "hi", "--max-tokens=0"], "max_tokens=0 is out of range"),
        (["run", "smollm2", "hi", "--top-p=2"], "top_p=2.0 is out of range"),
        (["run", "smollm2", "hi", "--regex=a", "--choice=b"], "--regex and --choice exclude each other"),
        (["run", "smollm2", "hi", "--json-schema=no.json"], "json_schema='no.json' cannot be read: No such file"),
        (["run", "smollm2", "hi", "--json-schema={"], "give a JSON schema, as a dict or as JSON text"),
        (["chat", "smollm2", "--grammar=/dev/zero"], "grammar='/dev/zero' cannot be read: it is a device"),
        (["run", "smollm2", "hi", "--seed", str(2**70)], "seed="),
        (["run", "smollm2", "hi", "--dtype=int3"], "dtype='int3' is unknown: choose one of auto, float32"),
        (["run", "smollm2", "hi", "--block-size=0"], "block_size=0 is out of range"),
        (["bench", "latency", "--repetitions=0"], "--repetitions=0 is out of range"),
        (["rm", "smollm2"], "no model named 'smollm2' is stored here"),
        (["pull", "./nowhere"], "no such file or folder: ./nowhere"),
    ]


def test_errors_are_one_line_and_exit_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in failing(tmp_path):
        assert main(arguments) == 1, arguments
        out, err = capsys.readouterr()
        line = err.replace("\r", "\n").strip().splitlines()[-1]
        assert out == "" and line.startswith("error: ") and words in line, (arguments, err)
        assert "Traceback" not in err and err.endswith("\n"), arguments


def test_an_unexpected_error_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("over\nthe edge")

    monkeypatch.setattr("penstock.hub.list_models", broken)
    assert main(["list"]) == 1
    line = "error: unexpected ZeroDivisionError: over the edge; set PENSTOCK_DEBUG=1 to see where\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert main(["list"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "mine.gguf").touch()
    command = f"{shlex.quote(sys.executable)} -m penstock list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, env=dict(os.environ))
    assert done.stderr == "" and done.stdout.splitlines()[-1] == "141"


def test_list_and_rm_of_a_stored_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "no models under" in capsys.readouterr().err
    (home / "models").mkdir(parents=True)
    (home / "models" / "mine.gguf").write_bytes(b"12345")
    assert main(["list"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "FORMAT", "MODIFIED", "PATH"]
    assert row.split()[:4] == ["mine.gguf", "5", "B", "gguf"]
    assert main(["list", "--json"]) == 0
    assert [model["num_bytes"] for model in json.loads(capsys.readouterr().out)] == [5]
    assert main(["rm", "mine"]) == 0
    assert capsys.readouterr().err == "removed mine.gguf: 5 B freed\n"
    assert main(["list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_info_without_a_model(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["home"] == str(home) and facts["models"] == [] and facts["threads"] >= 1
    assert facts["cpu_path"] in cpu.paths()
