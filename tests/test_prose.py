"""Names and docstrings keep to CONTRIBUTING.md: verbs for functions, plain first lines, one class of a name.

`tests/prose_allowed.txt` lists what offended before there was the rule; `python -m tests.test_prose` removes what no
longer does.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"
ALLOWED = Path(__file__).parent / "prose_allowed.txt"

REMEDIES = {
    "participle": "name a function by an imperative verb (`pack`, not `packed`), a boolean by is_, has_ or can_",
    "docstring": "say what it does (a function in the imperative); do not begin with What, Whose, Whether, Of or How",
    "class": "give the class a name that no other class has",
    "limit": "call it MAX_… or MIN_…",
}

IRREGULAR = set(
    "begun bought bound broken brought built caught chosen done drawn felt found frozen given gone grown heard held "
    "hidden kept known laid left lost made meant met paid said seen sent shown sold spent taken taught thought "
    "thrown told torn understood written".split()
)
NO_PARTICIPLE = set(  # verbs and nouns that only look like one
    "bring embed embedding encoding exceed feed heading need nothing pooling proceed reasoning ring sampling seed "
    "setting shed sibling something speed spelling string succeed thinking warning".split()
)
LEADING = set(  # a participle after one of these is its object or its predicate: `delete_expired`, `is_finished`
    "add admit are can check clear close copy count delete describe drop encode end enter fill find from get has is "
    "keep list load make mark needs num order pause preempt put quantize read reject remove reopen resume return run "
    "schedule send set skip start stop store take wait was write".split()
)
PROTOCOL = {  # asyncio calls these
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "wait_closed",
}
PUBLIC = {"participle output.CompletionOutput.finished"}  # vLLM's name, which programs call
TWINS = set(  # a part of a model's description in penstock/models and the layer built from it in penstock/layers
    "AnyBlock Attention Block Embedding EncoderAttention Experts Ffn GatedMlp Head LayerNorm Mamba2 Mixer MixerBlock "
    "Mlp OutputNormBlock ParallelBlock PostNormBlock RmsNorm ScaledBlock SinkAttention".split()
)


def is_participle(name: str) -> bool:
    words = [word for word in name.split("_") if word]
    if name in PROTOCOL or not words or name.startswith("__"):
        return False
    last = words[-1]
    if last in NO_PARTICIPLE or (len(words) > 1 and words[0] in LEADING):
        return False
    return last in IRREGULAR or re.fullmatch(r"\w{2,}ed|\w{3,}ing", last) is not None


def _is_hook(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for properties and for what a framework calls, whose name nobody writes."""
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return any(word in decorators for word in ("property", ".setter", "validator", "serializer", "command", "callback"))


def _offenders_in(node: ast.AST, scope: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of what offends under `node`; `scope` is the name it has from its module on."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node) or ""
        if re.match(r"(What|Whose|Whether|Of|How)\b", text):
            yield "docstring", scope
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name) and not _is_hook(node):
        yield "participle", scope
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        if isinstance(target, ast.Name) and re.match(r"(?:\w*_)?(MOST|LEAST)(_|$)", target.id):
            yield "limit", target.id
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _offenders_in(child, f"{scope}.{child.name}" if is_scope else scope)  # type: ignore[attr-defined]


def _duplicates() -> Iterator[str]:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(PACKAGE).parts[0])
    for name, found in homes.items():
        if len(found) > 1 and not (name in TWINS and sorted(found) == ["layers", "models"]):
            yield name


@cache
def offenders() -> Counter[str]:
    """Return every offence as a line of the list; names begin with their module's, not its folder's: modules move."""
    found: Counter[str] = Counter(f"class {name}" for name in _duplicates())
    for path in sorted(PACKAGE.rglob("*.py")):
        scope = path.parent.name if path.name == "__init__.py" else path.stem
        found.update(f"{kind} {name}" for kind, name in _offenders_in(ast.parse(path.read_text()), scope))
    for name in PUBLIC:
        del found[name]
    return found


def allowed() -> Counter[str]:
    return Counter(ALLOWED.read_text().splitlines()) if ALLOWED.exists() else Counter()


@pytest.mark.parametrize("kind", REMEDIES)
def test_nothing_new_offends(kind: str) -> None:
    new = sorted(line for line in offenders() - allowed() if line.split()[0] == kind)
    assert not new, f"{REMEDIES[kind]}:\n" + "\n".join(new)


def test_the_list_only_gets_shorter() -> None:
    mended = sorted(allowed() - offenders())
    assert not mended, "well done; run `python -m tests.test_prose` to remove the entries:\n" + "\n".join(mended)


def test_participles_are_known() -> None:
    assert all(map(is_participle, ("normed", "_packed", "sent", "still_awaited", "int_finished", "fitting")))
    assert not any(map(is_participle, ("is_finished", "embed", "delete_expired", "from_seed", "pack", "num_kept")))


@pytest.mark.skipif(not (PACKAGE / "passes").exists(), reason="models are bound to an op table by passes")
@pytest.mark.parametrize("part", ["layers", "quant", "passes"])
def test_ops_are_called_from_the_bound_table(part: str) -> None:
    """An op called by its module takes the device's usual body, whatever table the model was built with."""
    for path in sorted((PACKAGE / part).rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "penstock"
            for alias in node.names
            if alias.name == "ops"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                called = f"{path.relative_to(ROOT)}:{node.lineno} calls ops.{node.func.attr}"
                assert not (isinstance(owner, ast.Name) and owner.id in names), f"{called}: call the bound table's"


if __name__ == "__main__":
    kept = offenders() & allowed() if ALLOWED.exists() else offenders()
    ALLOWED.write_text("".join(f"{line}\n" for line in sorted(kept.elements())))
