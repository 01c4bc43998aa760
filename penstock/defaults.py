"""Sampling values of requests that name none: where they come from, and why each is as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, Setting
from penstock.errors import InvalidRequest
from penstock.hub.recommended import find_recommended
from penstock.override import LENGTH, NAMES, OPTION, RARE_NAMES, parse_override, sampling_of
from penstock.types import SamplingParams

AUTO, NEUTRAL = "auto", "vllm"
FILE = "generation_config.json"
LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True)
class Source:
    """A set of values with the reason for all of them. It is taken whole: what it leaves open is neutral."""

    values: Mapping[str, Any]
    why: str
    is_recommended: bool = False  # by the model's makers, or with its short name


@dataclass(frozen=True)
class Defaults:
    """The sampling values with their reasons; rare ones only where they are set. Where the model recommends none, an
    API's own take their place."""

    settings: tuple[Setting, ...]
    is_recommended: bool = False

    @classmethod
    def make(cls, source: Source, override: Mapping[str, Any]) -> Defaults:
        neutral, settings = SamplingParams(), []
        for name in (*NAMES, *RARE_NAMES, LENGTH):
            value, why = source.values.get(name), source.why
            if name in override:
                value, why = override[name], OPTION
            elif value is None:
                why = "neutral" if source.values else source.why
            if value is not None:
                settings.append(Setting("max_tokens" if name == LENGTH else name, value, why))
            elif name in NAMES:
                settings.append(Setting(name, getattr(neutral, name), why))
        return cls(tuple(settings), source.is_recommended)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{one.name: one.value for one in self.settings})

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an answer, where a generation config limits them."""
        return next((one.value for one in self.settings if one.name == "max_tokens"), None)

    def yield_to(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Those of an API's own values that hold: all that no override names, if the model recommends none."""
        kept = {one.name for one in self.settings if one.why == OPTION}
        return {} if self.is_recommended else {name: value for name, value in own.items() if name not in kept}


def find_defaults(
    config: EngineConfig, generation_config: Mapping[str, Any], metadata: Mapping[str, Any] | None
) -> Defaults:
    """`generation_config` is what the user's option or the checkpoint has; `metadata` is a GGUF file's, else None."""
    override = parse_override(config.override_generation_config) if config.override_generation_config else {}
    return Defaults.make(_source(config.generation_config, generation_config, metadata), override)


def from_wire(settings: Iterable[tuple[str, Any, str]], is_recommended: bool) -> Defaults:
    return Defaults(tuple(Setting(*one) for one in settings), is_recommended)


def _source(asked: str, found: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> Source:
    if asked == NEUTRAL:
        return Source({}, f"generation_config={NEUTRAL}: neutral")
    is_file = asked == AUTO and metadata is not None
    name = "general.sampling of the GGUF file" if is_file else FILE if asked == AUTO else str(Path(asked) / FILE)
    read = _read(found, name)
    if read.values or not is_file:
        return read
    known = find_recommended(metadata or {})
    if known:
        return Source(known.values, f"recommended for {known.name}", is_recommended=True)
    return Source(LLAMA_CPP, "the GGUF file recommends none: llama.cpp's")


def _read(found: Mapping[str, Any], name: str) -> Source:
    """Values of a generation config. One with do_sample=false is greedy."""
    values = {key: found[key] for key in (*NAMES, *RARE_NAMES, LENGTH) if type(found.get(key)) in (int, float)}
    why = name
    if found.get("do_sample") is False:
        values = {key: value for key, value in values.items() if key in ("repetition_penalty", LENGTH)}
        values["temperature"], why = 0.0, f"{name}, which has do_sample=false"
    try:
        sampling_of(values)
    except InvalidRequest as error:
        return Source({}, f"{name} cannot be used ({error}): neutral")
    if values:
        return Source(values, why, is_recommended=bool(values.keys() - {LENGTH}))
    return Source({}, f"{name} recommends none: neutral")
