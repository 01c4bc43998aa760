"""The measurement of start-up times, on a model that takes none."""

from __future__ import annotations

import json

import pytest

from bench.start import main

DUMMY = ("--repeat=1", "--load-format=dummy", "--threads=1")
PARTS = ["python", "commands", "torch", "engine", "tokenizer", "weights", "cache", "prompt", "first step"]


def test_every_part_has_its_time(chat_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([chat_model, "--json", *DUMMY]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["first_byte_s"]) == 1 and document["median_s"] > 0
    assert sorted(document["spans_s"]) == sorted(PARTS)  # the tokenizer and the weights begin together
    assert all(0 <= begin <= end for begin, end in document["spans_s"].values())


def test_a_model_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no such file or folder: ./nowhere"):
        main(["./nowhere", *DUMMY])
