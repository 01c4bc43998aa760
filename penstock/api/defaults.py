"""Sampling defaults of requests: their source and the reason for each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, Setting
from penstock.config.options import LENGTH, NAMES, OPTION, RARE_NAMES, make_sampling, parse_override
from penstock.errors import InvalidRequest
from penstock.hub.recommended import find_recommended
from penstock.types import SamplingParams

AUTO, NEUTRAL = "auto", "vllm"
FILE = "generation_config.json"
LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True)
class DefaultsSource:
    """A set of values with one reason. It is taken whole: what it leaves open is neutral."""

    values: Mapping[str, Any]
    why: str
    is_recommended: bool = False  # by the model's authors, or with its short name


@dataclass(frozen=True)
class Defaults:
    """Sampling defaults with their reasons; rare ones only if set. If the model recommends none, an API's own apply."""

    settings: tuple[Setting, ...]
    is_recommended: bool = False

    @classmethod
    def make(cls, source: DefaultsSource, override: Mapping[str, Any]) -> Defaults:
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
        """The maximum tokens of an answer, if a generation config limits them."""
        return next((one.value for one in self.settings if one.name == "max_tokens"), None)

    def yield_to(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of an API's own values that apply: all that no override names, if the model recommends none."""
        kept = {one.name for one in self.settings if one.why == OPTION}
        return {} if self.is_recommended else {name: value for name, value in own.items() if name not in kept}


def find_defaults(
    config: EngineConfig, generation_config: Mapping[str, Any], metadata: Mapping[str, Any] | None
) -> Defaults:
    """Find the defaults. `generation_config` is the user's or the checkpoint's; `metadata` a GGUF file's, else None."""
    override = parse_override(config.override_generation_config) if config.override_generation_config else {}
    return Defaults.make(_source(config.generation_config, generation_config, metadata), override)


def from_wire(settings: Iterable[tuple[str, Any, str]], is_recommended: bool) -> Defaults:
    return Defaults(tuple(Setting(*one) for one in settings), is_recommended)


def _source(asked: str, found: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> DefaultsSource:
    if asked == NEUTRAL:
        return DefaultsSource({}, f"generation_config={NEUTRAL}: neutral")
    is_file = asked == AUTO and metadata is not None
    name = "general.sampling of the GGUF file" if is_file else FILE if asked == AUTO else str(Path(asked) / FILE)
    read = _read(found, name)
    if read.values or not is_file:
        return read
    known = find_recommended(metadata or {})
    if known:
        return DefaultsSource(known.values, f"recommended for {known.name}", is_recommended=True)
    return DefaultsSource(LLAMA_CPP, "the GGUF file recommends none: llama.cpp's")


def _read(found: Mapping[str, Any], name: str) -> DefaultsSource:
    """Read a generation config; one with do_sample=false is greedy."""
    values = {key: found[key] for key in (*NAMES, *RARE_NAMES, LENGTH) if type(found.get(key)) in (int, float)}
    why = name
    if found.get("do_sample") is False:
        values = {key: value for key, value in values.items() if key in ("repetition_penalty", LENGTH)}
        values["temperature"], why = 0.0, f"{name}, which has do_sample=false"
    try:
        make_sampling(values)
    except InvalidRequest as error:
        return DefaultsSource({}, f"{name} cannot be used ({error}): neutral")
    if values:
        return DefaultsSource(values, why, is_recommended=bool(values.keys() - {LENGTH}))
    return DefaultsSource({}, f"{name} recommends none: neutral")
