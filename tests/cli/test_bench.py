from __future__ import annotations

import json

import pytest

from penstock.cli import main
from penstock.commands.bench import describe_drafts, fresh_prompts
from penstock.commands.output import Table

QUICK = ("--prompt-tokens=20", "--output-tokens=4", "--repetitions=2", "--load-format=dummy", "--threads=1")


def test_the_table(plain_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", plain_model, *QUICK]) == 0
    out, err = capsys.readouterr()
    header, ruler, reading, generating = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()
    ]
    assert header == ["model", "size", "params", "threads", "seqs", "test", "t/s", "ms"]
    assert (reading[5], generating[5]) == ("pp20", "tg4") and reading[3:5] == ["1", "1"]
    for row in (reading, generating):
        mean, deviation = row[6].split(" ± ")
        assert float(mean) > 0 and float(deviation) >= 0
    assert err.startswith("host time: ") and len(err.splitlines()) == 1


def test_acceptance_is_told(plain_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--speculative-config", '{"method": "lookahead"}', "--output-tokens=40"]
    assert main(["bench", "latency", plain_model, *QUICK[:1], *QUICK[2:], *options]) == 0
    assert "tokens accepted" in (err := capsys.readouterr().err) and "lookahead" in err
    stats = {"num_draft_tokens": 10, "num_accepted_tokens": 4, "num_drafts": 5, "num_draft_tokens_of_x": 10}
    stats |= {"num_accepted_tokens_of_x": 4} | {f"num_accepted_at_{place}": 3 - place for place in range(8)}
    stats |= {f"num_accepted_at_{place}": 0 for place in range(2, 8)}
    told = describe_drafts(stats)
    assert told == "drafts: 4 of 10 tokens accepted (40%; by place 60% 40%); x 4 of 10"


def test_json_and_nothing_found_in_the_cache(plain_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", plain_model, "--num-prompts=3", "--json", *QUICK]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [test["test"] for test in document["tests"]] == ["pp20", "tg4", "pp20+tg4"]
    for test in document["tests"]:
        assert len(test["times_s"]) == 2 and test["tokens_per_s"] > 0 and test["num_seqs"] == 3
    assert document["stats"]["num_cached_tokens"] == 0 and document["stats"]["max_batch_size"] >= 3


def test_prompts_never_repeat() -> None:
    make = fresh_prompts(1000)
    prompts = {tuple(make(16)) for _ in range(1000)}
    assert len(prompts) == 1000 and all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert fresh_prompts(1000)(16) != fresh_prompts(1000)(16)


def test_columns_line_up() -> None:
    table = Table("name", "t/s")
    table.add("a", "1.0")
    table.add("longer", "100.0")
    assert table.markdown(right=("t/s",)) == (
        "| name   |   t/s |\n|--------|------:|\n| a      |   1.0 |\n| longer | 100.0 |\n"
    )
    assert table.plain() == "name    t/s\na       1.0\nlonger  100.0\n"
