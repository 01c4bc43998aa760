"""Flags that several commands share: the engine's, one per field of EngineConfig, and the sampling ones."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from penstock.config import EngineConfig
from penstock.porting import port_options

if TYPE_CHECKING:
    from penstock.llm import LLM
    from penstock.types import SamplingParams

Model = Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]
ModelOrDefault = Annotated[str, typer.Argument(metavar="[MODEL]", hidden=True)]
System = Annotated[str | None, typer.Option("--system", help="System message before the conversation.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0 always takes the likeliest token. [default: as `penstock info MODEL` says]"),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable. [default: a new one]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Command = Callable[..., Any]


def engine_options(*left_out: str) -> Callable[[Command], Command]:
    """Add a flag for every engine option. The command receives those the user gave as `options: dict[str, Any]`."""
    return config_options(EngineConfig, "options", *left_out)


def config_options(config: Any, name: str, *left_out: str, hidden: bool = False) -> Callable[[Command], Command]:
    """Add a flag for every field of a config. The command receives those the user gave as `name: dict[str, Any]`.
    Hidden ones are not in the command's help."""
    flags = [flag for flag in _flags(config, hidden) if flag.name not in left_out]

    def decorate(function: Command) -> Command:
        own = [value for key, value in _parameters(function).items() if key != name]

        @wraps(function)
        def command(**values: Any) -> Any:
            given = {flag.name: values.pop(flag.name) for flag in flags}
            options = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in given.items()
                if value is not None
            }
            options = port_options(options) if config is EngineConfig else options
            config.from_options(**options)
            return function(**values, **{name: options})

        command.__signature__ = inspect.Signature(own + flags)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in own + flags}
        return command

    return decorate


def _parameters(function: Command) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters


@lru_cache(maxsize=4)
def _flags(config: Any, hidden: bool) -> list[inspect.Parameter]:
    kinds = get_type_hints(config)
    return [_flag(option, kinds[option.name], hidden) for option in fields(config)]


def _flag(option: Field[Any], kind: Any, hidden: bool) -> inspect.Parameter:
    """None stands for "not given", so that the config's own default and its reason hold."""
    dashed = option.name.replace("_", "-")
    flag = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    default = "" if option.default in (None, ()) else f" [default: {str(option.default).lower()}]"
    choices = option.metadata.get("choices")
    declared = typer.Option(
        flag,
        help=option.metadata["help"] + default,
        show_default=False,
        hidden=hidden,
        metavar="|".join(choices) if choices else None,
    )
    plain: Any = (
        list[str]
        if get_origin(kind) is tuple
        else next((part for part in getattr(kind, "__args__", ()) if part is not type(None)), kind)
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, declared]
    )


def sampling_values(max_tokens: int | None, temperature: float | None, seed: int | None) -> dict[str, Any]:
    """The sampling values the user gave, refused here when they are out of range: before any model is loaded."""
    from penstock.types import SamplingParams

    values: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**given)
    return given


def answer_params(llm: LLM, values: dict[str, Any]) -> SamplingParams:
    """The user's values over the model's defaults, which are those of the server, too."""
    return llm.default_sampling_params().clone(**{"max_tokens": None, **values})


def answer_limit(llm: LLM, values: dict[str, Any], most: int | None = None) -> int | None:
    """Tokens after which an answer is ended, unless the user gave their number: `most`, or fewer if the model's
    generation config says so."""
    limits = [limit for limit in (most, llm.service.assembly.defaults.max_tokens) if limit]
    return min(limits, default=None) if "max_tokens" not in values else None


def open_llm(model: str, options: dict[str, Any]) -> LLM:
    from penstock.interrupts import final_interrupts

    with _uncollected():
        with final_interrupts():
            from penstock.llm import LLM
        return LLM(model, **options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """What a command's process imports and loads first stays to its end: the garbage collector, which would go through
    all of torch again and again, leaves it out. A process that has torch already is somebody else's."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def new_seed() -> int:
    """For a request that shall differ each time, yet be repeatable once its seed is known."""
    return int.from_bytes(os.urandom(4), "little")
