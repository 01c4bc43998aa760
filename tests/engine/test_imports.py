"""The core is plain Python: it starts in milliseconds and is simulated for millions of steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("cache", "engine")
    for path in (ROOT / "penstock" / package).glob("*.py")
)
CORE = [name.removesuffix(".__init__") for name in CORE] + [
    f"penstock.{name}" for name in ("types", "config", "config.options", "errors")
]
HEAVY = ("torch", "numpy", "safetensors", "tokenizers", "gguf", "jinja2", "huggingface_hub", "typer", "rich", "tqdm")


def test_the_core_imports_neither_torch_nor_numpy() -> None:
    script = f"import sys, {', '.join(CORE)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert len(CORE) > 15


def test_imports_point_one_way() -> None:
    """The cache knows nothing of the engine, and neither knows of models or devices."""
    for name in CORE:
        path = ROOT.joinpath(*name.split("."))
        source = (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text()
        allowed = {"penstock.cache": ("cache",), "penstock.engine": ("cache", "engine")}.get(
            name[: name.rfind(".")], ()
        )
        for line in source.splitlines():
            if line.strip().startswith(("from penstock.", "import penstock.")):
                package = line.split()[1].split(".")[1]
                assert package in ("types", "config", "errors", *allowed), f"{name}: {line}"
