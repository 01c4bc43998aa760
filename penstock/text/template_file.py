"""A chat template that the user gives in place of the model's own."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InvalidConfig, shown
from penstock.regular import MIB, UnreadableFile, read_regular

MAX_TEMPLATE_BYTES = MIB
WRITTEN = ("{{", "{%", "{#")  # in a template, and in no file's name


def read_template(given: str) -> str:
    """The template in the file `given`, or `given` itself where it is one. Refused unless it can be compiled."""
    is_text = any(sign in given for sign in WRITTEN)
    source = given if is_text else _read(given)
    if not source.strip():
        raise InvalidConfig(f"chat_template={shown(given)} is empty: name a file with a Jinja template")
    _check(source, "chat_template" if is_text else f"chat_template={shown(given)}")
    return source


def _read(path: str) -> str:
    try:
        return read_regular(Path(path).expanduser(), MAX_TEMPLATE_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidConfig(
            f"chat_template={shown(path)} cannot be read: {error.reason}; name a file, or give the template itself"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(
            f"chat_template={shown(path)} is not UTF-8 text: {error}; convert it, as iconv does"
        ) from None


def _check(source: str, name: str) -> None:
    from jinja2 import TemplateSyntaxError

    from penstock.text.sandbox import sandbox

    try:
        sandbox().from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidConfig(f"{name} is no Jinja template: line {error.lineno}: {shown(error.message or '')}") from None
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise InvalidConfig(f"{name} cannot be compiled: {shown(str(error))}; write a simpler one") from None
