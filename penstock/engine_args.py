"""vLLM's EngineArgs: options of an engine as one object, and as flags of a script's own command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, get_type_hints

from penstock.config import EngineConfig
from penstock.porting import HARMLESS, LIMITED, port_options

DEFAULT_MODEL = "smollm2"


class EngineArgs:
    """A model's name and options; `vars` of it are the arguments of LLM."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        EngineConfig.from_options(**port_options(options))
        self.model = model
        vars(self).update(options)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option; those that are not given are absent from what is parsed."""
        parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, .gguf file, short name or org/name")
        kinds = get_type_hints(EngineConfig)
        for option in fields(EngineConfig):
            _add_flag(parser, option.name, kinds[option.name], option.metadata["help"])
        for name, taken in (*HARMLESS.items(), *LIMITED.items()):
            if name not in kinds:
                _add_flag(parser, name, taken[0], argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        known = {option.name for option in fields(EngineConfig)} | set(HARMLESS) | set(LIMITED) | {"model"}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


class AsyncEngineArgs(EngineArgs):
    """The same, for AsyncLLMEngine."""


def _add_flag(parser: argparse.ArgumentParser, name: str, kind: Any, help: str) -> None:
    dashed = f"--{name.replace('_', '-')}"
    plain = next((part for part in getattr(kind, "__args__", ()) if part is not type(None)), kind)
    if plain is bool:
        parser.add_argument(dashed, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
    else:
        parser.add_argument(dashed, type=plain if plain in (int, float) else str, default=argparse.SUPPRESS, help=help)
