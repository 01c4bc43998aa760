"""Options from a file: the flags' names, with underscores or dashes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidConfig


def read_options(path: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The models, the engine's options and the server's."""
    from penstock.server.config import ServerConfig

    values = {str(name).replace("-", "_"): value for name, value in _parse(Path(path)).items()}
    models = values.pop("model", [])
    models = [models] if isinstance(models, str) else models
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise InvalidConfig(f"{path}: model must be a string or a list of them")
    known = {kind: {option.name for option in fields(kind)} for kind in (EngineConfig, ServerConfig)}
    for name in values:
        if not any(name in names for names in known.values()):
            raise InvalidConfig(f"{path}: unknown option {name!r}; penstock serve --help lists them")
    engine = {name: value for name, value in values.items() if name in known[EngineConfig]}
    server = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
              if name in known[ServerConfig]}
    return models, engine, server


def _parse(path: Path) -> dict[str, Any]:
    import msgspec

    try:
        text = path.read_bytes()
        if path.suffix in (".yaml", ".yml"):
            values = msgspec.yaml.decode(text)
        elif path.suffix == ".toml":
            values = msgspec.toml.decode(text)
        else:
            raise InvalidConfig(f"{path}: the file must end in .yaml, .yml or .toml")
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from None
    except ImportError as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from None
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path} must hold options by name")
    return values
