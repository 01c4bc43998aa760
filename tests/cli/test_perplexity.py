from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.cli import main

DUMMY = ("--load-format=dummy", "--threads=1")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """1,000 bytes, which are as many tokens of the tiny models."""
    path = tmp_path / "text.txt"
    path.write_text("Water runs down.\n".ljust(20, ".") * 50)
    return str(path)


def test_the_figures_on_standard_output(plain_model: str, text: str, capsys: Capture) -> None:
    assert main(["perplexity", plain_model, text, "--window=128", "--stride=32", *DUMMY]) == 0
    out, err = capsys.readouterr()
    facts = dict(re.split("  +", line) for line in out.splitlines())
    assert list(facts) == ["perplexity", "nats/token", "bits/byte", "scored", "window", "time"] and err == ""
    value, error = (float(word) for word in facts["perplexity"].split(" ± "))
    assert value == pytest.approx(256, rel=0.1) and 0 < error < 10
    assert facts["scored"] == "999 tokens, 999 bytes" and facts["window"] == "128 tokens, stride 32"


def test_json(plain_model: str, text: str, capsys: Capture) -> None:
    assert main(["perplexity", plain_model, text, "--json", "--max-tokens=300", *DUMMY]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["file"]) == (plain_model, text)
    assert [document[name] for name in ("num_tokens", "num_bytes", "window", "stride")] == [299, 299, 1024, 512]
    assert document["bits_per_byte"] == pytest.approx(document["nats_per_token"] / 0.693147, rel=1e-4)
    assert document["perplexity"] > document["standard_error"] > 0 and document["seconds"] > 0


def test_what_is_refused(plain_model: str, text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "latin1.txt").write_bytes("Ärger".encode("latin-1"))
    (tmp_path / "short.txt").write_text("ab")
    (tmp_path / "empty.txt").touch()
    cases = [
        (["missing.txt"], "missing.txt cannot be read (No such file or directory): give a text file"),
        ([str(tmp_path)], "cannot be read (Is a directory)"),
        ([str(tmp_path / "latin1.txt")], "latin1.txt is not UTF-8 text: byte 0 is 0xc4"),
        ([str(tmp_path / "empty.txt")], "the text has 0 tokens to score"),
        ([str(tmp_path / "short.txt")], "the text has 2 tokens to score, too few"),
        ([text, "--window=16385"], "window=16385 exceeds the context length of 16384"),
        ([text, "--window=8", "--stride=9"], "stride=9 leaves no context in a window of 8"),
        ([text, "--max-tokens=-1"], "max_tokens=-1 is out of range"),
    ]
    for arguments, words in cases:
        assert main(["perplexity", plain_model, *arguments, *DUMMY]) == 1, arguments
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err, (arguments, err)


def test_the_file_is_needed(capsys: Capture) -> None:
    assert main(["perplexity", "smollm2"]) == 2
    assert "FILE" in capsys.readouterr().err.upper()
