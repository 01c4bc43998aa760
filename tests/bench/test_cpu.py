"""The harness from end to end: Penstock alone, one round, a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import cpu
from bench.cases import CASES
from tests.llm.tiny import write_config

ENGINES = "penstock,llamacpp,vllm"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("bench")
    model = write_config(folder / "tiny", max_position_embeddings=2048)
    output = folder / "result.json"
    status = cpu.main(
        [
            "--files",
            model,
            "--engines",
            ENGINES,
            "--quick",
            "--threads",
            "1",
            "--output",
            str(output),
            "--folder",
            str(folder),
            "--option",
            "penstock.load_format=dummy",
            "--note",
            "a trial",
        ]
    )
    return status, output


@pytest.fixture(scope="module")
def document(finished: tuple[int, Path]) -> dict[str, Any]:
    status, output = finished
    assert status == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_every_case_was_measured(document: dict[str, Any]) -> None:
    assert document["complete"] and document["quick"] and not document["failures"]
    assert [row["case"] for row in document["summary"]] == list(CASES)
    for row in document["summary"]:
        assert (row["engine"], row["file"], row["num_samples"]) == ("penstock", "tiny", 1)
        assert row["median"] > 0 and row["ratio_to_llamacpp"] is None and row["ratios"] == {}


def test_samples_have_the_lengths_that_were_asked_for(document: dict[str, Any]) -> None:
    for sample in document["samples"]:
        case = CASES[sample["case"]].shrunk(8)
        assert sample["num_output_tokens"] == case.num_seqs * case.num_output
        assert 0 < sample["first_s"] <= sample["total_s"]
        assert sample["value"] == pytest.approx(case.value({**sample, "num_outputs": [sample["num_output_tokens"]]}))


def test_the_document_says_where_it_comes_from(document: dict[str, Any]) -> None:
    assert document["cpu_mode"] == "native" and document["threads"] == 1 and document["notes"] == ["a trial"]
    assert document["machine"]["cores"] >= 1 and "commit" in document
    assert set(document["absent"]) == {"llamacpp", "vllm"}
    assert document["engines"]["penstock on tiny"]["cpu_path"]
    assert document["files"]["tiny"]["vocab_size"] > 0
    assert "absent" in document["limits"] or document["limits"]["read_gb_per_s"]
    [host] = document["host"]
    assert host["file"] == "tiny" and ("absent" in host or 0 < host["host_s"] <= host["step_s"])


def test_a_table_lies_beside_it_and_no_run_is_overwritten(finished: tuple[int, Path], document: dict[str, Any]) -> None:
    _, output = finished
    assert "| Penstock, tiny |" in output.with_suffix(".md").read_text()
    before = output.read_bytes()
    assert cpu.main(["--files", "smollm2-q4_1", "--output", str(output)]) == 1
    assert output.read_bytes() == before
