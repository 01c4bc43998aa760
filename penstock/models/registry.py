"""The known families: each a function from a config to a ModelSpec, with tiny configs its tests are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.config import Config
from penstock.models.spec import ModelSpec

Read = Callable[[Config], ModelSpec]


@dataclass(frozen=True)
class Family:
    architecture: str
    read: Read
    like: tuple[Mapping[str, Any], ...]  # tiny configs that together reach every branch of `read`


FAMILIES: dict[str, Family] = {}


def family(architecture: str, *, like: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Callable[[Read], Read]:
    """Register the decorated function under the name that `architectures` in config.json gives."""
    configs = (like,) if isinstance(like, Mapping) else tuple(like)
    if not configs or not all(configs):
        raise ValueError(f"family {architecture} has no tiny config to test it with: pass like=")
    if architecture in FAMILIES:
        raise ValueError(f"family {architecture} is registered already")

    def register(read: Read) -> Read:
        FAMILIES[architecture] = Family(architecture, read, configs)
        return read

    return register


def find_family(config: Mapping[str, Any]) -> Family:
    if not isinstance(config, Mapping):
        raise InvalidModel("config.json must hold a JSON object")
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise InvalidModel(f"config key architectures={str(named)[:80]!r} must be a list that names the model's class")
    for name in named:
        if name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(sorted(FAMILIES))
    raise InvalidModel(f"unknown architecture {', '.join(named)[:200]}: the known ones are {known}")


def spec_from_config(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """What the model is, resolved for sequences of up to `max_model_len` (default: all the model's positions)."""
    found = find_family(config)
    reader = Config(config, max_model_len)
    reader.only("is_encoder_decoder", False)
    spec = found.read(reader)
    reader.finish()
    return replace(spec, architecture=found.architecture)
