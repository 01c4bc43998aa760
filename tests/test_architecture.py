"""The repository is what ARCHITECTURE.md says: its paths exist, imports point one way, links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.site.hooks import OWN
from docs.site.reference import PAGES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"
PURE = (
    "engine",
    "cache",
    "server",
    "types",
    "config",
    "errors.py",
    "api/defaults.py",
    "text/intake.py",
    "text/answers.py",
    "host/version.py",
)

# what a module may import of ours, besides itself and its own package
ALLOWED = {
    "errors": (),
    "types": ("errors",),
    "host": ("errors",),
    "config": ("types", "errors"),
    "cache": ("types", "config", "errors"),
    "engine": ("cache", "types", "config", "errors"),
    "ops": ("errors",),
    "quant": ("ops", "errors"),
    "parallel": ("ops", "errors"),
    "layers": ("quant", "ops", "errors"),
    "models": ("layers", "quant", "ops", "cache", "host", "errors"),
    "passes": ("models", "layers", "quant", "parallel", "ops", "errors"),
    "sampling": ("ops", "engine", "types", "errors"),
    "draft": ("sampling", "models", "layers", "quant", "ops", "engine", "config", "types", "errors"),
    "runner": (
        "draft",
        "sampling",
        "passes",
        "models",
        "layers",
        "parallel",
        "ops",
        "cache",
        "engine",
        "host",
        "types",
        "config",
        "errors",
    ),
    # runner: a step's tensors and the cache's memory, not what drives them
    "quantize": ("runner", "passes", "models", "layers", "quant", "ops", "cache", "text", "host", "errors"),
    "hub": ("errors", "host"),
    "text": ("types", "errors", "hub", "host"),
    "api": (
        "quantize",
        "runner",
        "draft",
        "passes",
        "sampling",
        "models",
        "parallel",
        "ops",
        "cache",
        "engine",
        "sandbox",
        "text",
        "hub",
        "host",
        "config",
        "types",
        "errors",
        "outputs",
        "inputs",
    ),
    # the API process: it talks with workers by messages, and has no part of what computes
    "server": ("api", "hub", "host", "sandbox", "text", "engine", "types", "config", "errors"),
}
API_OF_SERVER = ("penstock.api.defaults",)
GENERATED = {ROOT / "docs/reference" / f"{name}.md" for name in (*PAGES, *OWN)}  # of the manual
MESSAGES = ("penstock.engine.ipc", "penstock.engine.messages")
FUSED = ("qkv_attention", "qkv_write", "fp8_mlp")  # ops that only rules of `lower` call
PLAIN = {"Epilogue": 1, "rms_norm": 3, "layer_norm": 4}  # arguments of the plain ones; more of them fuse what follows


@cache
def imports(path: Path) -> list[str]:
    return list(_find_imports(path))


def _find_imports(path: Path) -> Iterator[str]:
    """Modules a file imports when it is imported or run, TYPE_CHECKING blocks aside."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def sources(part: str) -> list[Path]:
    path = PACKAGE / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("part", PURE)
def test_core_knows_no_tensors(part: str) -> None:
    for path in sources(part):
        for name in imports(path):
            assert name.split(".")[0] not in ("torch", "numpy"), f"{path.name} imports {name}"


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_point_one_way(part: str) -> None:
    own = part if (PACKAGE / part).is_dir() else f"{part}.py"
    for path in sources(own):
        for name in imports(path):
            pieces = name.split(".")
            if pieces[0] == "penstock" and len(pieces) > 1 and pieces[1] != part:
                assert pieces[1] in ALLOWED[part], f"{path.relative_to(ROOT)} imports {name}"


def test_server_knows_the_engine_by_its_messages() -> None:
    for path in sources("server"):
        for name in imports(path):
            assert not name.startswith("penstock.engine") or name in MESSAGES, f"{path.name} imports {name}"


def test_server_takes_nothing_of_the_api_that_computes() -> None:
    for path in sources("server"):
        for name in imports(path):
            assert not name.startswith("penstock.api") or name in API_OF_SERVER, f"{path.name} imports {name}"


def test_layers_know_a_weight_by_its_interface() -> None:
    """A layer that imports a scheme would ask which one it has."""
    for path in sources("layers"):
        for name in imports(path):
            assert not name.startswith("penstock.quant") or name == "penstock.quant.scheme", (
                f"{path.name} imports {name}"
            )


@pytest.mark.parametrize("part", sorted(set(ALLOWED) - {"ops"}))
def test_fused_ops_are_called_by_rules_alone(part: str) -> None:
    """Elsewhere a product has its bias and a norm its weight: what else a kernel can do on the way is for `lower`."""
    for path in sources(part if (PACKAGE / part).is_dir() else f"{part}.py"):
        if path.parent != PACKAGE / "passes/lower":
            for call in _calls(ast.parse(path.read_text())):
                assert not is_fused(call), (
                    f"{path.relative_to(ROOT)}:{call.lineno} calls {ast.unparse(call.func)}: a rule may"
                )


def is_fused(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_op = name == "Epilogue" or (isinstance(call.func, ast.Attribute) and "ops" in ast.unparse(call.func.value))
    return is_op and (name in FUSED or len(call.args) + len(call.keywords) > PLAIN.get(name, 99))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_fused_calls_are_known() -> None:
    fused = (
        "ops.qkv_write(x)",
        "self.ops.rms_norm(x, w, eps, residual)",
        "Epilogue(bias, residual=x)",
        "norm.ops.fp8_mlp()",
    )
    plain = "self.ops.rms_norm(x, w, eps)", "rms_norm(c, size)", "Epilogue(bias)", "self.ops.layer_norm(x, w, b, eps)"
    assert all(is_fused(call) for text in fused for call in _calls(ast.parse(text)))
    assert not any(is_fused(call) for text in plain for call in _calls(ast.parse(text)))
    assert any(is_fused(call) for path in sources("passes/lower") for call in _calls(ast.parse(path.read_text())))


def test_paths_in_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`((?:penstock|tests|docs|bench)/[\w./-]*)`", text)
    assert len(paths) > 30
    for path in paths:
        assert (ROOT / path).exists(), f"ARCHITECTURE.md names {path}"
    for name in re.findall(r"`((?:cache|engine|runner|models|sampling)/\w+\.py)`", text):
        assert (PACKAGE / name).exists(), f"ARCHITECTURE.md names {name}"


@pytest.mark.parametrize("path", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        is_generated = (path.parent / link).resolve() in GENERATED
        if "://" not in link and not is_generated:
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_package_says_what_it_is() -> None:
    for init in sorted(PACKAGE.rglob("__init__.py")):
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init.relative_to(ROOT)} has no docstring"
