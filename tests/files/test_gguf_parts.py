"""Split GGUF models: written by the `gguf` package, opened by any part, refused with a reason where parts differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from convert import MODELS, tiny_model, write_gguf
from layout import STRING, U32, Layout, entry, tensor, text, u32

from penstock.errors import InvalidModel
from penstock.hub.resolve import local_model
from penstock.models.files import open_checkpoint
from penstock.models.files.gguf_parts import GgufModel

U16 = 2


def write_split(whole: Path, folder: Path, most: int, small_first: bool = False) -> list[Path]:
    """The same model in parts of at most `most` tensors, by the package's own splitting."""
    source = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=most, small_first_shard=small_first)
    for field in source.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), *field.types)
    for each in source.tensors:
        writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(tiny_model("llama"), MODELS["llama"][0], path, gguf.GGMLQuantizationType.Q8_0)
    return path


@pytest.mark.parametrize("small_first", [False, True])
def test_every_part_opens_the_whole_model(whole: Path, tmp_path: Path, small_first: bool) -> None:
    parts = write_split(whole, tmp_path, 6, small_first)
    assert len(parts) > 3 and bool(gguf.GGUFReader(parts[0]).tensors) != small_first
    expected = open_checkpoint(whole)
    for path in (parts[0], parts[2], parts[-1], local_model(tmp_path)):
        found = open_checkpoint(path)
        assert sorted(found.names()) == sorted(expected.names()) and found.config == expected.config
        assert found.num_bytes == expected.num_bytes and found.quantization == expected.quantization
        for name in expected.names():
            assert torch.equal(found.tensor(name), expected.tensor(name)), name
            one, other = found.read_ggml(name), expected.read_ggml(name)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert np.array_equal(one.raw, other.raw)
        found.close()


def test_missing_parts_are_named(whole: Path, tmp_path: Path) -> None:
    parts = write_split(whole, tmp_path, 6)
    parts[1].unlink()
    for path in (parts[0], parts[-1]):
        with pytest.raises(InvalidModel, match=rf"has {len(parts)} parts and {parts[1].name} is missing; put all"):
            open_checkpoint(path)
    parts[2].unlink()
    with pytest.raises(InvalidModel, match=rf"{parts[1].name} is missing with 1 more"):
        open_checkpoint(parts[0])


def test_parts_of_other_models_are_refused(whole: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    parts, others = write_split(whole, one, 6), write_split(whole, other, 8)
    shutil.copy(others[1], parts[1])
    with pytest.raises(InvalidModel, match=r"00002-of-\d+\.gguf: split.count is|it must be a whole number"):
        open_checkpoint(parts[0])
    shutil.copy(parts[2], parts[1])
    with pytest.raises(InvalidModel, match="is part 3 of .* its name must end in -00003-of-"):
        open_checkpoint(parts[0])


def test_a_renamed_part_says_its_name(whole: Path, tmp_path: Path) -> None:
    parts = write_split(whole, tmp_path, 6)
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(InvalidModel, match=r"must end in -00001-of-\d{5}\.gguf"):
        open_checkpoint(tmp_path / "renamed.gguf")


def part(number: int, count: int = 2, total: int = 2, names: tuple[str, ...] = ("a",)) -> bytes:
    entries = [
        entry("general.architecture", STRING, text("llama")),
        entry("split.no", U32, u32(number)),
        entry("split.count", U32, u32(count)),
        entry("split.tensors.count", U32, u32(total)),
    ]
    return bytes(Layout(entries=entries, tensors=[tensor(name, (4,), 0, 32 * i) for i, name in enumerate(names)]))


DAMAGE = {
    "number above count": ((part(2), part(1, names=("b",))), "split.no is '2'; it must be a whole number from 0 to 1"),
    "tensor twice": ((part(0), part(1)), "tensor 'a' is in x-00001-of-00002.gguf too"),
    "tensor missing": (
        (part(0, total=3), part(1, total=3, names=("b",))),
        "split.tensors.count is 3, the 2 parts hold 2 tensors",
    ),
    "totals differ": ((part(0), part(1, total=3, names=("b",))), "split.tensors.count is '3', .* says 2"),
    "counts differ": ((part(0), part(1, count=3, names=("b",))), "split.count is '3', .* says 2"),
    "many": ((part(0, count=60000), b""), "split.count is '60000'; it must be a whole number from 0 to 4096"),
    "no total": (
        (
            bytes(
                Layout(
                    entries=[
                        entry("general.architecture", STRING, text("llama")),
                        entry("split.no", U16, b"\0\0"),
                        entry("split.count", U16, b"\2\0"),
                    ]
                )
            ),
            part(1),
        ),
        "split.tensors.count is missing",
    ),
    "cut off": ((part(0), part(1, names=("b",))[:-80]), "x-00002-of-00002.gguf: tensor 'b' ends at byte"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(tmp_path: Path, name: str) -> None:
    contents, message = DAMAGE[name]
    for number, content in enumerate(contents, 1):
        (tmp_path / f"x-{number:05}-of-00002.gguf").write_bytes(content)
    with pytest.raises(InvalidModel, match=message) as refused:
        GgufModel(tmp_path / "x-00001-of-00002.gguf")
    assert "\n" not in str(refused.value)
