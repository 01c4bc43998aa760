"""Spellings of flags that vLLM's command line takes too: --a_b for --a-b, --a.b VALUE for --a '{"b": VALUE}'."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import typer

from penstock.config.cache_dtypes import WINDOWS

MODULES, LAYERS = "--lora-modules", "--kv-cache-dtype-skip-layers"
END = "--"  # of the flags
MAX_KEYS = 8  # of one nested name


def normalize(args: list[str], known: Collection[str]) -> list[str]:
    """Return the arguments in the spelling of the `known` flags."""
    num_flags = args.index(END) if END in args else len(args)
    dashed = [_dash(arg, known) for arg in args[:num_flags]]
    return join_layers(spread_modules(_nest(dashed, known))) + args[num_flags:]


def _dash(arg: str, known: Collection[str]) -> str:
    name, equals, value = arg.partition("=")
    first, dot, keys = name.partition(".")
    plain = first.replace("_", "-")
    is_other = arg.startswith("--") and first not in known and plain in known
    return plain + dot + keys + equals + value if is_other else arg


def _nest(args: list[str], known: Collection[str]) -> list[str]:
    """Gather --name.key VALUE in one JSON object for --name, over the object given for it."""
    kept: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    rest = iter(args)
    for arg in rest:
        name, _, keys = arg.partition("=")[0].partition(".")
        if not (keys and name.startswith("--") and name in known):
            kept.append(arg)
            continue
        path = keys.split(".")
        if len(path) > MAX_KEYS or not all(path):
            raise typer.BadParameter(f"{arg.partition('=')[0]} is no flag: give --name.key VALUE")
        _put(nested.setdefault(name, {}), path, _read_value(arg, rest))
    for name, values in nested.items():
        kept = _merge(kept, name, values)
    return kept


def _read_value(arg: str, rest: Iterator[str]) -> Any:
    name, equals, text = arg.partition("=")
    if not equals:
        text = next(rest, "")
        if not text or text.startswith("--"):
            raise typer.BadParameter(f"{name} needs a value: give {name} VALUE")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = values.setdefault(key.replace("-", "_"), {})
        if not isinstance(inner, dict):
            raise typer.BadParameter(f"{'.'.join(path)}: {key} has a value already")
        values = inner
    values[path[-1].replace("-", "_")] = value


def _merge(args: list[str], name: str, values: dict[str, Any]) -> list[str]:
    """Put `values` into the object that `args` give for `name`, or add the flag."""
    for at, arg in enumerate(args):
        flag, equals, text = arg.partition("=")
        if flag != name:
            continue
        given = text if equals else args[at + 1] if at + 1 < len(args) else ""
        try:
            whole = json.loads(given)
        except (ValueError, RecursionError):
            whole = None
        if not isinstance(whole, dict):
            raise typer.BadParameter(f"{name} {given} and {name}.{next(iter(values))} exclude each other: give one")
        return [*args[:at], f"{name}={json.dumps(whole | values)}", *args[at + (1 if equals else 2) :]]
    return [*args, f"{name}={json.dumps(values)}"]


def join_layers(args: list[str]) -> list[str]:
    """Join the values of --kv-cache-dtype-skip-layers by commas: vLLM's takes several."""
    joined: list[str] = []
    for arg in args:
        names_layers = arg.isdigit() or arg == WINDOWS
        if names_layers and len(joined) > 1 and joined[-2] == LAYERS:
            joined[-1] += f",{arg}"
        else:
            joined.append(arg)
    return joined


def spread_modules(args: list[str]) -> list[str]:
    """Repeat --lora-modules before each adapter: vLLM's takes several."""
    spread: list[str] = []
    names_modules = False
    for arg in args:
        is_module = "=" in arg and not arg.startswith("-") or arg.startswith(("{", "["))
        if names_modules and is_module and spread[-1] != MODULES:
            spread.append(MODULES)
        names_modules = arg == MODULES or names_modules and is_module
        spread.append(arg)
    return spread
