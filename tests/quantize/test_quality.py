"""Comparisons of models: figures that follow from their definitions, and the commands as users run them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import transformers

from penstock.cli import main
from penstock.errors import InvalidModel, InvalidRequest
from penstock.models.files import open_checkpoint
from penstock.quantize.compare import Text, compare
from penstock.quantize.report.figures import QualityReport
from tests.quantize.conftest import TEXT, write_folder


def text_of(tokens: list[int]) -> Text:
    return Text([tokens[:90], tokens[60:130], tokens[130:141]], [1, 30, 1])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The same model with weights changed a little."""
    made = write_folder(tmp_path_factory.mktemp("other") / "changed")
    model = transformers.AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor.float()).to(tensor.dtype) * 0.02)
    model.save_pretrained(made)
    return made


def logits(path: Path, window: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([window])).logits[0].double()
    return found


def test_figures_are_transformers(folder: Path, other: Path, tokens: list[int]) -> None:
    text = text_of(tokens)
    found = compare(open_checkpoint(folder), open_checkpoint(other), text)
    losses: tuple[list[float], list[float]] = ([], [])
    apart, same = [], 0
    for window, first in zip(text.windows, text.firsts):
        wanted = torch.tensor(window[first:])
        logs = [torch.log_softmax(logits(path, window)[first - 1 : -1], -1) for path in (folder, other)]
        apart += (logs[0].exp() * (logs[0] - logs[1])).sum(-1).tolist()
        same += int((logs[0].argmax(-1) == logs[1].argmax(-1)).sum())
        for known, log in zip(losses, logs):
            known += (-log.gather(1, wanted[:, None])[:, 0]).tolist()
    assert found.num_tokens == text.num_scored == len(apart) == 89 + 40 + 10
    assert torch.allclose(torch.tensor(found.divergences), torch.tensor(apart), rtol=1e-2, atol=1e-4)
    assert torch.allclose(torch.tensor(found.first_losses), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
    assert torch.allclose(torch.tensor(found.second_losses), torch.tensor(losses[1]), rtol=1e-3, atol=1e-3)
    assert abs(found.num_same - same) <= 1
    figures = found.summary()
    assert figures["kl_mean"] == pytest.approx(sum(found.divergences) / len(apart))
    assert figures["perplexity_b"] == pytest.approx(math.exp(sum(losses[1]) / len(apart)), rel=1e-3)
    assert figures["kl_median"] <= figures["kl_p99"] <= figures["kl_max"]


def test_a_model_is_as_good_as_itself(folder: Path, tokens: list[int]) -> None:
    found = compare(open_checkpoint(folder), open_checkpoint(folder), text_of(tokens))
    assert found.num_same == found.num_tokens and not any(found.divergences)
    assert found.layers.keys() == {"layers.0", "layers.1"} and not any(found.layers.values())


def test_other_vocabularies_are_refused(folder: Path, tokens: list[int], tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="different vocabularies.* 256 and .* 300 tokens"):
        compare(open_checkpoint(folder), open_checkpoint(write_folder(tmp_path / "b", vocab_size=300)), text_of(tokens))


class Page(HTMLParser):
    """Collects the names of tags, and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def test_the_page_loads_nothing_and_escapes_names(folder: Path, other: Path, tokens: list[int]) -> None:
    comparison = compare(open_checkpoint(folder), open_checkpoint(other), text_of(tokens))
    page = Page()
    text = QualityReport("<script>a</script>", "b & c", "t", comparison, (200, 100), ([1.0, 2.0], [4.0, 8.0])).page()
    page.feed(text)
    assert page.tags.count("svg") == 3 and "script" not in page.tags and not page.addresses
    assert "nan" not in re.sub(r"<style>.*?</style>|[a-z]*nan[a-z]+", "", text)
    assert "&lt;script&gt;a" in text and "4.0 tok/s" not in text and "8.0 tok/s (4.00 of A)" in text


def test_commands_print_a_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    out = tmp_path / "out"
    assert main(["quantize", str(folder), str(out), "--scheme", "int4", "--calibration", str(text)]) == 0
    table = capsys.readouterr().out
    assert "KL(A ‖ B), mean" in table and "error of layers." in table and "tok/s" in table
    assert (out / "quality.html").stat().st_size > 2000
    page = tmp_path / "page.html"
    given = ["quality", str(folder), str(out), "--text", str(text), "--json", "--no-speed", "--html", str(page)]
    assert main([*given, "--max-tokens", "200"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["kl_mean"] < 1 and found["num_tokens"] == 199 and found["bytes_b"] < found["bytes_a"]
    assert page.exists() and "tokens_per_s_a" not in found


def test_what_follows_a_finished_model_cannot_undo_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that is called like a known model, a page that is there, and a report that fails."""
    from penstock.api.quality import measure

    monkeypatch.chdir(tmp_path)
    given = ["--scheme", "gguf:Q8_0", "--calibration", "none", "--no-speed"]
    page = tmp_path / "smollm2.quality.html"
    page.write_text("mine")
    monkeypatch.setattr(measure, "MAX_TOKENS", 100)
    assert main(["quantize", str(folder), "smollm2.gguf", *given]) == 0
    printed = capsys.readouterr()
    assert "perplexity" in printed.out and "B: smollm2.gguf" in printed.out and "tok/s" not in printed.out
    assert page.read_text() == "mine" and "no page with plots: smollm2.quality.html cannot be written" in printed.err
    assert main(["quantize", str(folder), "smollm2", "--scheme", "int8", *given[2:]]) == 0
    assert "B: smollm2\n" in capsys.readouterr().out and (tmp_path / "smollm2/quality.html").exists()

    def fail(*arguments: object, **more: object) -> None:
        raise InvalidModel("these two do not compare")

    monkeypatch.setattr(measure, "measure_speeds", fail)
    assert main(["quantize", str(folder), "slow", "--scheme", "int8", *given[2:4], "--json"]) == 0
    printed = capsys.readouterr()
    assert "kl_mean" in json.loads(printed.out) and "slow is complete; no speeds: these two" in printed.err
    monkeypatch.setattr(measure, "measure_quality", fail)
    assert main(["quantize", str(folder), "out", "--scheme", "int8", *given[2:]]) == 0
    note = f"out is complete; no report: these two do not compare; run penstock quality {folder} {tmp_path}/out\n"
    assert note in capsys.readouterr().err


def test_speeds_on_two_devices_do_not_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.api.llm import LLM
    from penstock.api.quality.measure import measure_speeds

    opened: list[str] = []
    load = LLM._load

    def load_as_if(self: LLM) -> None:
        load(self)
        opened.append(self.model)
        device = "cuda" if len(opened) == 1 else "cpu"
        self.service.assembly = replace(
            self.service.assembly, settings=replace(self.service.assembly.settings, device=device)
        )

    monkeypatch.setattr(LLM, "_load", load_as_if)
    with pytest.raises(InvalidRequest, match="runs on cuda and .* on cpu, so their speeds do not compare"):
        measure_speeds(str(folder), str(folder))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--scheme", "int4", "--calibration", "EMPTY"], "error: the calibration text EMPTY is empty"),
        (["--scheme", "int4", "--calibration", "missing"], "error: missing cannot be read"),
        (["--scheme", "gguf:Q4_K_M"], r"give it a name that ends in \.gguf"),
        (["--scheme", "int4", "--method", "smoothquant"], "error: method=smoothquant does not make scheme=int4"),
        ([], "Missing option '--scheme'"),
    ],
)
def test_bad_commands_get_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "EMPTY").write_text(" \n")
    arguments = [str(tmp_path / "EMPTY") if each == "EMPTY" else each for each in arguments]
    assert main(["quantize", str(folder), str(tmp_path / "out"), *arguments]) != 0
    printed = capsys.readouterr()
    assert re.search(message, printed.err.replace(f"{tmp_path}/", "")) and printed.err.count("\n") == 1
    assert not list(tmp_path.glob("out*"))
