"""The README and the quickstart say only what works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    return [line[line.index("penstock ") :] for line in lines if re.search(r"(^|\| )penstock ", line)]


@pytest.mark.parametrize("line", commands())
def test_a_command_can_be_parsed(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: min([words.index(word) for word in ("|", "<") if word in words], default=len(words))]
    group: Any = typer.main.get_command(app)
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("penstock", words)


def test_the_readme_has_commands_and_the_api() -> None:
    assert len(commands()) > 10
    assert "LLM(" in blocks(ROOT / "README.md", "python")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert links and missing == []
