"""The manual: its pages are listed, its commands and fields exist, its reference is whole."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs.site.hooks import OWN
from docs.site.reference import PAGES, list_commands, list_metrics
from penstock.cli import app
from penstock.config import EngineConfig

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PROSE = sorted(path for path in [ROOT / "README.md", *DOCS.rglob("*.md")] if "decisions" not in path.parts)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def list_pages(nav: Any) -> list[str]:
    """Flatten mkdocs' navigation into the pages it names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in list_pages(part)]


def test_navigation_lists_every_page_once() -> None:
    pages = list_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "decisions"}
    generated = {f"reference/{name}.md" for name in (*PAGES, *OWN)}
    assert sorted(pages) == sorted(own | generated)


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_has_rows(name: str) -> None:
    text = PAGES[name]()
    assert text.startswith("# ")
    assert sum(line.startswith(("| `", "* ")) for line in text.splitlines()) > 10


def test_reference_lists_what_there_is() -> None:
    settings, routes = PAGES["settings"](), PAGES["routes"]()
    assert all(f"`{option.name}`" in settings for option in fields(EngineConfig))
    assert "`/v1/chat/completions` | POST" in routes and "`/health/ready` | GET" in routes
    assert {"penstock:num_requests_running", "penstock:time_to_first_token_seconds"} <= set(dict(list_metrics()))


def test_environment_variables_are_those_that_are_read() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "penstock").rglob("*.py"))
    read = set(re.findall(r"[\"'](PENSTOCK_[A-Z_]+)[\"']", code)) - {"PENSTOCK_PATH"}
    listed = set(re.findall(r"`(PENSTOCK_[A-Z_]+)`", (DOCS / "environment.md").read_text()))
    assert listed == read


def known_flags() -> dict[str, set[str]]:
    commands = list_commands(typer.main.get_command(app), "penstock")
    return {name: {flag for option in command.params for flag in option.opts} for name, command in commands}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_commands_and_flags_exist(path: Path) -> None:
    known = known_flags()
    names = sorted(known, key=len, reverse=True)
    blocks = [code for kind, code in BLOCK.findall(path.read_text()) if kind in ("sh", "bash", "console", "")]
    shown = "\n".join(blocks).replace("\\\n", " ").splitlines() + re.findall(r"`(penstock [^`]+)`", path.read_text())
    for line in shown:
        command = re.sub(r"\s#.*", "", line).partition("|")[0].strip()
        command = re.sub(r"^([A-Z_]+=\S+ )+|^\$ ", "", command)
        if not re.match(r"penstock [a-z-]+", command) or "COMMAND" in command:
            continue
        name = next((name for name in names if re.match(rf"{name}(\s|$|[,;])", command)), None)
        assert name or command.split()[1] in {"bench"}, f"{path.name}: `{command}` is no command"
        flags = re.findall(r"(?<=\s)--[a-z-]+", re.sub(r"'[^']*'|\"[^\"]*\"", "", command))
        for flag in flags if name else []:
            assert name and flag in known[name] | {"--help"}, f"{path.name}: {name} has no {flag}"


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_python_examples_parse(path: Path) -> None:
    for kind, code in BLOCK.findall(path.read_text()):
        if kind == "python":
            ast.parse(code)


def test_quoted_errors_are_those_that_appear() -> None:
    """Whoever searches for the text that they see finds it."""
    sources = (*(ROOT / "penstock").rglob("*.py"), ROOT / "Makefile")
    texts = re.sub(r'"\s*f?"', "", "\n".join(path.read_text() for path in sources))  # strings in several pieces are one
    rows = re.findall(r"^\| `([^|]+)\|", (DOCS / "troubleshooting.md").read_text(), re.M)
    quoted = [text for row in rows for text in re.findall(r"([^`]+)`", row)[::2]]
    assert len(quoted) >= 8
    for text in quoted:
        for part in filter(str.strip, text.split("…")):
            assert part in texts, f"troubleshooting.md quotes {text!r}, but no source has {part!r}"


def test_every_question_is_answered_by_a_link() -> None:
    rows = re.findall(r"^\| … (.+?) \| (.+?) \|$", (DOCS / "how-do-i.md").read_text(), re.M)
    assert len(rows) >= 15
    for question, answer in rows:
        links = re.findall(r"\]\(([^)#]+)", answer)
        assert links, question
        assert all((DOCS / link).exists() or link.startswith("reference/") for link in links), question


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material: run `make docs`")
def test_manual_builds_without_a_dead_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 40
    outside = [
        link for page in pages for link in re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    ]
    assert not outside, "the manual loads nothing from elsewhere"
    shutil.rmtree(tmp_path / "site")
