"""Families stay small and are data: no tensors, no forward code; and the how-to shows one as it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock.models.families as families
from penstock.models.spec import ALIASES, FAMILIES, family

FOLDER = Path(families.__file__ or "").parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "parts"))
DOCS = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_family_is_a_small_file_of_data(path: Path) -> None:
    text = path.read_text()
    assert len(ast.unparse(ast.parse(text)).splitlines()) <= 100
    imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    allowed = ("__future__", "penstock.models.", "dataclasses")
    assert all(module.startswith(allowed) for module in imported), imported
    assert not imported & {"penstock.models.load", "penstock.models.decoder"}


def test_every_file_registers_a_family() -> None:
    modules = {found.read.__module__.rsplit(".", 1)[-1] for found in FAMILIES.values()}
    assert modules == {path.stem for path in FILES}


def test_aliases_name_families() -> None:
    assert set(ALIASES.values()) <= set(FAMILIES) and not set(ALIASES) & set(FAMILIES)


def test_reading_configs_needs_no_torch() -> None:
    code = "import sys, penstock.models.spec as r; assert r.FAMILIES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_family_needs_a_tiny_config() -> None:
    nothing: list[Any] = [{}, [], [{}]]
    for like in nothing:
        with pytest.raises(ValueError, match="no tiny config"):
            family("NewForCausalLM", like=like)
    assert "NewForCausalLM" not in FAMILIES
    with pytest.raises(ValueError, match="registered already"):
        family("LlamaForCausalLM", like={"vocab_size": 1})


def test_the_how_to_shows_a_family_as_it_is() -> None:
    blocks = [part.partition("```")[0] for part in DOCS.read_text().split("```python\n")[1:]]
    shown = [block for block in blocks if "@family" in block]
    source = (FOLDER / "olmo2.py").read_text()
    assert shown and all(block.strip() in source for block in shown)
