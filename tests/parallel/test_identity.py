"""Models of ranks are told apart by samples of every tensor, whatever their files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from penstock.api.ranks.identity import describe_weights, identify
from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
from penstock.host import samples
from penstock.models.files import open_checkpoint
from penstock.models.files.safetensors import INDEX
from penstock.runner.ranks.messages import Identity, require_equal
from tests.files.convert import tiny_model, write_gguf

NUM_LAYERS = 6


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layers.{number}.weight": torch.randn(256, 128) for number in range(NUM_LAYERS)} | {
        "norm.weight": torch.randn(128)
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 1, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 128, **config}))
    names = list(tensors)
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = {name: f"part-{number % num_files}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def describe(path: Path) -> dict[str, str]:
    return describe_weights(open_checkpoint(path))


def test_one_changed_matrix_is_named(tmp_path: Path) -> None:
    """As of an adapter that was merged: same config, same headers, one matrix near what it was."""
    tensors = make_tensors()
    own = describe(write(tmp_path / "own", tensors))
    assert own == describe(write(tmp_path / "copy", tensors)) and len(own) == NUM_LAYERS + 1
    for name in ("layers.3.weight", "norm.weight"):
        merged = {**tensors, name: tensors[name] * 1.001}
        theirs = describe(write(tmp_path / f"merged {name}", merged))
        assert [each for each in own if own[each] != theirs[each]] == [name]


def test_files_may_be_cut_otherwise(tmp_path: Path) -> None:
    tensors = make_tensors()
    assert describe(write(tmp_path / "one", tensors)) == describe(write(tmp_path / "three", tensors, 3))


def test_many_tensors_are_read_at_fewer_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(1 << 20))
    found: list[int] = []
    monkeypatch.setattr(samples, "MAX_READS", 64)

    def note(name: str, num_bytes: int, num_places: int) -> list[int]:
        found.append(num_places)
        return [0]

    monkeypatch.setattr(samples, "_choose_places", note)
    for num_tensors in (1, 32, 1000):
        samples.sample_spans({str(number): (file, 0, 1 << 20) for number in range(num_tensors)})
        assert set(found) == {max(1, min(4, 64 // num_tensors))}
        found.clear()


def test_gguf_files_are_compared(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(model, "llama", tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q4_0)
    write_gguf(model, "llama", tmp_path / "same.gguf", gguf.GGMLQuantizationType.Q4_0)
    with torch.no_grad():
        next(iter(model.model.layers)).mlp.up_proj.weight.mul_(1.5)
    write_gguf(model, "llama", tmp_path / "tuned.gguf", gguf.GGMLQuantizationType.Q4_0)
    own, same, tuned = (describe(tmp_path / name) for name in ("a.gguf", "same.gguf", "tuned.gguf"))
    assert own == same
    assert [name for name in own if own[name] != tuned[name]] == ["blk.0.ffn_up.weight"]


def test_the_error_says_what_differs(tmp_path: Path) -> None:
    def introduce(name: str, seed: int, **config: Any) -> Identity:
        checkpoint = open_checkpoint(write(tmp_path / name, make_tensors(seed), **config))
        return identify(EngineConfig(), checkpoint.config, checkpoint)

    own = introduce("own", 0, rope_theta=1.0)
    require_equal(1, own, introduce("same", 0, rope_theta=1.0))
    with pytest.raises(InvalidConfig, match="7 of 7 tensors differ, the first is layers.0.weight='float"):
        require_equal(1, own, introduce("tuned", 1, rope_theta=1.0))
    with pytest.raises(InvalidConfig, match="another config: rope_theta=2.0, but rank 0 has 1.0: copy the model's"):
        require_equal(1, own, introduce("longer", 0, rope_theta=2.0))
