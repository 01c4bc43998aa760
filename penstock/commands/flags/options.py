"""Shared flags: one per field of EngineConfig, and the sampling ones."""

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

from penstock.api.vllm.porting import port_options
from penstock.commands.flags.command import ENGINE, HELP_ALL
from penstock.commands.flags.groups import MACHINES, SERVER_GROUPS
from penstock.config import EngineConfig

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.types import SamplingParams


Model = Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]
ModelOrDefault = Annotated[str, typer.Argument(metavar="[MODEL]", hidden=True)]
System = Annotated[str | None, typer.Option("--system", help="System message of the conversation.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ALIASES = {  # vLLM's short flags
    "data_parallel_size": ("-dp",),
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
}
Run = Callable[..., Any]
LORA = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")
STORE = ("kv_offloading_size", "kv_offloading_path", "kv_offloading_disk_size")
SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
RANKS = (*SIZES, "enable_expert_parallel", "distributed_executor_backend")
SERVING = ("ttft_slo_ms", "tpot_slo_ms", *LORA, *STORE, "nnodes")  # engine options of `serve` alone, and in its help


def engine_options(*left_out: str) -> Callable[[Run], Run]:
    """Add a flag for every engine option but those of servers. The command gets those the user set as
    `options: dict[str, Any]`."""
    return config_options(EngineConfig, "options", *left_out, *SERVING, *MACHINES)


def config_options(config: Any, name: str, *left_out: str, hidden: bool = False) -> Callable[[Run], Run]:
    """Add a flag for every field of `config`. The command gets those the user set as `name: dict[str, Any]`. Hidden
    flags are not in the help, but those of servers are."""

    def read(options: dict[str, Any]) -> dict[str, Any]:
        options = port_options(options) if config is EngineConfig else options
        config.from_options(**options)
        return options

    flags = [flag for flag in _flags(config, hidden) if flag.name not in left_out]
    return add_flags([*flags, HELP_ALL] if name == "options" else flags, name, read)  # once in a command


def add_flags(
    flags: list[inspect.Parameter], name: str, read: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[Run], Run]:
    """Add flags to a command, which gets what `read` makes of those the user set as `name: dict[str, Any]`."""

    def decorate(function: Run) -> Run:
        own = [value for key, value in _parameters(function).items() if key != name]

        @wraps(function)
        def command(**values: Any) -> Any:
            given = {flag.name: values.pop(flag.name) for flag in flags}
            given.pop(HELP_ALL.name, None)  # its callback did it
            options = read(
                {
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in given.items()
                    if value is not None
                }
            )
            return function(**values, **{name: options})

        command.__signature__ = inspect.Signature(own + flags)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in own + flags}
        return command

    return decorate


def _parameters(function: Run) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters


@lru_cache(maxsize=4)
def _flags(config: Any, hidden: bool) -> list[inspect.Parameter]:
    kinds = get_type_hints(config)
    is_engine = config is EngineConfig
    return [
        _flag(option, kinds[option.name], hidden and option.name not in (*SERVING, *SIZES), is_engine)
        for option in fields(config)
    ]


def _flag(option: Field[Any], kind: Any, hidden: bool, is_engine: bool) -> inspect.Parameter:
    """Make one flag; None means "not set", so that the config's own default and its reason apply."""
    dashed = option.name.replace("_", "-")
    flag = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    default = "" if option.default in (None, ()) else f" [default: {str(option.default).lower()}]"
    choices = option.metadata.get("choices")
    declared = typer.Option(
        flag,
        *ALIASES.get(option.name, ()),
        help=option.metadata["help"] + default,
        show_default=False,
        hidden=hidden,
        metavar="|".join(choices) if choices else None,
        rich_help_panel=ENGINE if is_engine else SERVER_GROUPS.get(option.name),
    )
    plain: Any = (
        list[str]
        if get_origin(kind) is tuple
        else next((part for part in getattr(kind, "__args__", ()) if part is not type(None)), kind)
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, declared]
    )


def answer_params(llm: LLM, values: dict[str, Any]) -> SamplingParams:
    """Apply the user's values over the model's defaults, as the server does."""
    return llm.default_sampling_params().clone(**{"max_tokens": None, **values})


def answer_limit(llm: LLM, values: dict[str, Any], max_tokens: int | None = None) -> int | None:
    """Return the token limit of an answer unless the user set one: `max_tokens`, or less by the generation config."""
    limits = [limit for limit in (max_tokens, llm.service.assembly.defaults.max_tokens) if limit]
    return min(limits, default=None) if "max_tokens" not in values else None


def open_llm(model: str, options: dict[str, Any]) -> LLM:
    from penstock.host.interrupts import final_interrupts

    with _freeze_imports():
        with final_interrupts():
            from penstock.api.llm import LLM
        return LLM(model, **options)


@contextmanager
def _freeze_imports() -> Iterator[None]:
    """Freeze what this process imports and loads first, so that the garbage collector does not scan torch. Skip it
    in a process that already has torch."""
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
    """Return a random seed, to report so that the answer can be repeated."""
    return int.from_bytes(os.urandom(4), "little")
