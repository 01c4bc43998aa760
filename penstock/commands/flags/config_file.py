"""Options from a file, named like the flags, and the flags of `vllm serve` that Penstock does not need."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

from penstock.api.vllm.porting import HARMLESS, LIMITED, SERVER_HARMLESS, SERVER_LIMITED, port_options, take_flag
from penstock.config import EngineConfig, option
from penstock.errors import InvalidConfig, quote
from penstock.host.files import MIB, UnreadableFile, read_regular
from penstock.server.config import ServerConfig


def _kinds() -> dict[str, type]:
    """Return types by name, without those that the engine or server has itself."""
    own = {field.name for config in (EngineConfig, ServerConfig) for field in fields(config)}
    tables = (HARMLESS, LIMITED, SERVER_HARMLESS, SERVER_LIMITED)
    return {name: entry[0] for table in tables for name, entry in table.items() if name not in own}


def _take_all(**options: Any) -> None:
    """Warn that each has no effect, or refuse it."""
    for name, value in options.items():
        take_flag(name, value)


VllmFlags: Any = make_dataclass(
    "VllmFlags",
    [(name, kind, option(None, "vLLM's")) for name, kind in _kinds().items()],
    namespace={"from_options": staticmethod(_take_all)},
)


MAX_CONFIG_BYTES = MIB
MAX_DEPTH = 8  # nesting; YAML's parser overflows the stack at some thousands


def read_options(path: str) -> tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the models, the engine's options, the server's, and vLLM's other ones."""
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
            raise InvalidConfig(f"{path}: unknown option {quote(name)}; penstock serve --help lists them")
    engine, server, vllm = (
        {name: _value(value, names[name]) for name, value in values.items() if name in names}
        for names in known.values()
    )
    return models, port_options(engine), server, vllm


def _value(value: Any, kind: str) -> Any:
    """Convert to a flag's type: a repeatable one is a tuple, even of a single string."""
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
        raise InvalidConfig(f"{path} is damaged: its lists or tables are nested too deeply") from None
    except ValueError as error:  # also msgspec.DecodeError, invalid UTF-8 and invalid dates
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
