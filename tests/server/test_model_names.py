"""Names of models: several for the first one, any name, and the names that clients hard-code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import InvalidConfig
from penstock.server.catalog import MAX_NAME_CHARS, Catalog
from penstock.server.config import ServerConfig
from penstock.server.http.errors import ApiError
from penstock.server.model import ServedModel
from penstock.server.ollama.models import find_model


class NoLoras(frozenset[str]):
    """Adapters of a model that has none."""

    def list_names(self) -> list[str]:
        return []


def catalog(*names: str, aliases: tuple[str, ...] = ()) -> Catalog:
    models = [cast(ServedModel, SimpleNamespace(name=name, model=f"/models/{name}", loras=NoLoras())) for name in names]
    return Catalog(models, aliases=aliases)


def found(models: Catalog, name: str, **more: Any) -> str | None:
    try:
        return models.find(name, **more).name
    except ApiError as error:
        assert (error.status, error.code) == (404, "model_not_found")
        return None


def test_every_name_is_the_first_models() -> None:
    models = catalog("a", "b", aliases=("a", "x", "y"))
    assert [found(models, name) for name in ("a", "x", "y", "b", "/models/b")] == ["a", "a", "a", "b", "b"]
    assert [models.list_names(one) for one in models] == [["a", "x", "y"], ["b"]]
    with pytest.raises(ApiError, match="the models are a, x, y, b"):
        models.find("z")


def test_any_name() -> None:
    models = catalog("a", "b", aliases=("a", "*"))
    assert [found(models, name) for name in ("b", "whatever", "meta/llama", "x" * MAX_NAME_CHARS)] == ["b", *"aaa"]
    assert found(models, "x" * (MAX_NAME_CHARS + 1)) is None
    assert models.list_names(models.default) == ["a"]


HARD_CODED = (
    "dummy",
    "tgi",
    "default",
    "local-model",
    "gpt-4o",
    "gpt-3.5-turbo",
    "claude-sonnet-4-5",
    "text-embedding-3-small",
)


@pytest.mark.parametrize("name", HARD_CODED)
def test_hard_coded_names(name: str) -> None:
    assert found(catalog("a"), name) == "a"
    assert found(catalog("a"), name, is_exact=True) is None
    assert found(catalog("a", "b"), name) is None
    assert find_model(catalog("a"), f"{name}:latest").name == "a"


@pytest.mark.parametrize("name", ["smollm3", "gpt-oss-20b", "gpt-j-6b", "gpt2", "Default", "", "gpt-" + "x" * 10_000])
def test_a_name_that_means_a_model(name: str) -> None:
    assert found(catalog("a"), name) == (None if name else "a")


def test_a_model_has_its_own_name_first() -> None:
    assert found(catalog("a", "gpt-4o", aliases=("*",)), "gpt-4o") == "gpt-4o"


def test_what_the_command_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[dict[str, str], ServerConfig]] = []

    def serve(models: dict[str, str], options: Any, config: ServerConfig) -> int:
        taken.append((models, config))
        return 0

    monkeypatch.setattr("penstock.server.run.serve", serve)
    run = CliRunner().invoke
    flags = ["serve", "smollm2", "--served-model-name", "*", "--served-model-name", "a", "--served-model-name", "b"]
    assert run(app, flags).exit_code == 0
    assert taken[0][0] == {"a": "smollm2"} and taken[0][1].served_model_name == ("*", "a", "b")
    assert run(app, ["serve", "smollm2", "--served-model-name", "*"]).exit_code == 0
    assert taken[1][0] == {"smollm2": "smollm2"}
    other = run(app, [*flags, "--model", "b=minilm"])
    assert isinstance(other.exception, InvalidConfig) and "another model's name" in str(other.exception)
    with pytest.raises(InvalidConfig, match="served_model_name='' is empty"):
        ServerConfig(served_model_name=("",))
