"""Generate the manual's reference pages from the code: what they say is what runs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "penstock"
METRIC = re.compile(r"penstock:\w+$")


def make_table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("\\|`", "\\|`")


def make_commands() -> str:
    import typer

    from penstock.cli import app
    from penstock.config import EngineConfig

    engine = {option.name for option in fields(EngineConfig)}
    parts = ["# Commands and flags\n", "Generated from the commands. `penstock COMMAND --help` prints the same.\n"]
    for name, command in list_commands(typer.main.get_command(app), "penstock"):
        parts += [f"## {name}\n", f"{inspect.cleandoc(command.help or '')}\n"]
        flags = [option for option in command.params if option.param_type_name == "option" and not option.hidden]
        own = [option for option in flags if option.name not in engine]
        rows = ((f"`{_spell(option)}`", option.help or "") for option in own)
        parts.append(make_table(("flag", "does"), rows) if own else "")
        if len(own) < len(flags):
            parts.append("\nand the [engine's settings](settings.md#the-engines), such as `--max-model-len`.\n")
    return "\n".join(parts)


def list_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that runs, with its whole name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for key in sorted(command.commands):
        if not command.commands[key].hidden:
            yield from list_commands(command.commands[key], f"{name} {key}")


def _spell(option: Any) -> str:
    names = " / ".join([*option.opts, *option.secondary_opts])
    from penstock.commands.flags.command import VALUES

    kind = option.metavar or VALUES.get(getattr(option.type_descriptor.annotation, "__name__", ""), "TEXT")
    return names if option.is_flag else f"{names} {kind}"


def make_settings() -> str:
    from penstock.config import EngineConfig
    from penstock.server.config import ServerConfig

    parts = [
        "# Settings\n",
        "Every setting is a flag (`max_num_seqs` is `--max-num-seqs`), a key of `--config` files, and",
    ]
    parts.append(
        "those of the engine are arguments of `LLM(…)`. `/info` says each value and why; `serve` lists at its start\n"
        "what differs from the defaults.\n"
    )
    for title, config in (("The engine's", EngineConfig), ("The server's", ServerConfig)):
        rows = ((f"`{option.name}`", _show_default(option), option.metadata["help"]) for option in fields(config))
        parts += [f"## {title}\n", make_table(("setting", "default", "is"), rows)]
    return "\n".join(parts)


def _show_default(option: Any) -> str:
    return "" if option.default in (None, ()) else f"`{str(option.default).lower()}`"


def make_routes() -> str:
    from penstock.server import app

    parts = ["# Routes\n", "`/docs` of a running server shows the same with every field.\n"]
    tables = [("GET", app.READS), ("POST", app.WRITES), ("DELETE", app.DELETES)]
    found = [(path, method, entry[-1]) for method, table in tables for path, *entry in table]
    for tag in sorted({str(tag) for _, _, tag in found}, key=str.lower):
        own = sorted({(path, method) for path, method, of in found if of == tag})
        parts += [f"## {tag}\n", make_table(("route", "method"), ((f"`{path}`", method) for path, method in own))]
    return "\n".join(parts)


def make_fields() -> str:
    from penstock.server import app

    parts = [
        "# Request fields\n",
        "The fields of every body. Where no default is shown, the model's or the server's holds.\n",
    ]
    for path, _, body, _ in sorted(
        (entry for entry in (*app.WRITES, *app.DELETES) if entry[2]), key=lambda entry: entry[0]
    ):
        schema: dict[str, Any] = body.model_json_schema() if body else {}
        rows = [(f"`{name}`", _kind(part), _default_of(part)) for name, part in schema.get("properties", {}).items()]
        parts += [f"## {path}\n", make_table(("field", "type", "default"), iter(rows))]
    return "\n".join(parts)


def _kind(part: dict[str, Any]) -> str:
    if "$ref" in part:
        return str(part["$ref"]).rpartition("/")[2]
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_kind(choice) for choice in part["anyOf"] if choice.get("type") != "null"))
    if "enum" in part or "const" in part:
        return ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    if part.get("type") == "array":
        return f"list of {_kind(part.get('items', {}))}"
    return str(part.get("type", "any"))


def _default_of(part: dict[str, Any]) -> str:
    value = part.get("default")
    return "" if value is None or isinstance(value, dict | list) else f"`{str(value).lower()}`"


def make_metrics() -> str:
    names = dict(sorted(list_metrics()))
    rows = ((f"`{name}`", help) for name, help in names.items())
    text = "# Metrics\n\n`/metrics` in Prometheus' format. Counters end in `_total` there; histograms have `_bucket`, "
    text += "`_sum` and `_count`.\n\n"
    return text + make_table(("metric", "is"), rows)


@cache
def parse_package() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def list_metrics() -> Iterator[tuple[str, str]]:
    """Yield every metric with its help, wherever the code declares one."""
    for _, tree in parse_package():
        constants = {
            node.targets[0].id: _text(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            pairs: list[tuple[ast.expr | None, ast.expr]] = []
            if isinstance(node, ast.Dict):
                pairs = list(zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.Call) and len(node.args) > 1:
                pairs = [(node.args[0], node.args[1])]
            for key, value in pairs:
                name = constants.get(key.id, "") if isinstance(key, ast.Name) else _text(key)
                first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
                if METRIC.match(name) and _text(first):
                    yield name, _text(first)


def _text(node: ast.expr | None) -> str:
    """Return the text of a literal, with … where a value is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def make_errors() -> str:
    parts = [
        "# Error texts\n",
        "Every error that Penstock words itself, with … for the values it names. Search this page for yours.",
    ]
    parts.append(
        "What to do is in the text; [troubleshooting](../troubleshooting.md) says more about the common ones.\n"
    )
    rooms: dict[str, set[str]] = {}
    for room, text in list_errors():
        rooms.setdefault(room, set()).add(text)
    for room, texts in sorted(rooms.items()):
        parts += [f"## {room}\n", *(f"* {_escape(text)}" for text in sorted(texts, key=str.lower)), ""]
    return "\n".join(parts)


def list_errors() -> Iterator[tuple[str, str]]:
    """Yield every error's text with the package that raises it."""
    from penstock import errors

    known = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    for path, tree in parse_package():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known | {"ApiError"}:
                texts = [_text(argument) for argument in node.args[:2]]
                yield from (
                    (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), text) for text in texts if " " in text
                )


def make_python() -> str:
    import penstock

    def describe(name: str) -> tuple[str, str]:
        thing = getattr(penstock, name)
        text = (inspect.getdoc(thing) or "").split("\n\n")[0] if callable(thing) else ""
        return f"`{name}`", "" if text.startswith(f"{name}(") else text  # a dataclass without a docstring

    parts = [
        "# Python\n",
        "What `from penstock import …` offers. [Quickstart](../quickstart.md#python) shows it at work;",
    ]
    parts.append("[porting from vLLM](../porting-from-vllm.md) lists the differences.\n")
    parts.append(make_table(("name", "is"), (describe(name) for name in sorted(penstock.__all__))))
    for name in ("LLM", "AsyncLLM"):
        parts.append(f"## {name}\n")
        methods = [(key, value) for key, value in vars(getattr(penstock, name)).items() if is_public(key, value)]
        rows = (
            (f"`{key}{_arguments(value)}`", (inspect.getdoc(value) or "").split("\n\n")[0]) for key, value in methods
        )
        parts.append(make_table(("method", "does"), rows))
    return "\n".join(parts)


def is_public(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and not name.startswith("_")


def _arguments(function: Callable[..., Any]) -> str:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"({', '.join(names)})"


PAGES: dict[str, Callable[[], str]] = {
    "commands": make_commands,
    "settings": make_settings,
    "routes": make_routes,
    "fields": make_fields,
    "metrics": make_metrics,
    "errors": make_errors,
    "python": make_python,
}
