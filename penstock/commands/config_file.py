"""Options from a file: the flags' names, with underscores or dashes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidConfig, shown
from penstock.porting import port_options
from penstock.regular import MIB, UnreadableFile, read_regular

MAX_CONFIG_BYTES = MIB
MAX_DEPTH = 8  # of lists in lists; at some thousands YAML's parser overflows the stack


def read_options(path: str) -> tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The models, the engine's options, the server's, and vLLM's that are neither."""
    from penstock.commands.vllm_flags import VllmFlags
    from penstock.server.config import ServerConfig

    values = {str(name).replace("-", "_"): value for name, value in _parse(Path(path)).items()}
    models = values.pop("model", [])
    models = [models] if isinstance(models, str) else models
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise InvalidConfig(f"{path}: model must be a string or a list of them")
    known = {
        kind: {option.name: str(option.type) for option in fields(kind)}
        for kind in (EngineConfig, ServerConfig, VllmFlags)
    }
    for name in values:
        if not any(name in names for names in known.values()):
            raise InvalidConfig(f"{path}: unknown option {shown(name)}; penstock serve --help lists them")
    engine, server, vllm = (
        {name: _value(value, names[name]) for name, value in values.items() if name in names}
        for names in known.values()
    )
    return models, port_options(engine), server, vllm


def _value(value: Any, kind: str) -> Any:
    """As a flag would have it: one that may be repeated is a tuple, also of a single string."""
    if kind.startswith("tuple"):
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value
    return value


def _parse(path: Path) -> dict[str, Any]:
    import msgspec

    try:
        text = read_regular(path, MAX_CONFIG_BYTES)
        if path.suffix in (".yaml", ".yml"):
            values = _parse_yaml(text)
        elif path.suffix == ".toml":
            values = msgspec.toml.decode(text)
        else:
            raise InvalidConfig(f"{path}: the file must end in .yaml, .yml or .toml")
    except UnreadableFile as error:
        raise InvalidConfig(f"{path} cannot be read: {error.reason}") from None
    except ImportError as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from None
    except InvalidConfig:
        raise
    except RecursionError:
        raise InvalidConfig(f"{path} is damaged: its lists or tables lie too deep in each other") from None
    except ValueError as error:  # also msgspec.DecodeError, bytes that are no UTF-8, dates that are none
        raise InvalidConfig(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path} must hold options by name")
    return values


def _parse_yaml(text: bytes) -> Any:
    import msgspec
    import yaml

    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise RecursionError
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return msgspec.yaml.decode(text)
