"""What `import penstock` costs, and which names it has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import penstock

LAZY = ["gguf", "jinja2", "huggingface_hub", "llguidance", "typer", "rich", "tqdm", "transformers"]


def all_modules_after(*lines: str) -> set[str]:
    """What a fresh interpreter has loaded after these lines."""
    code = "\n".join([*lines, "import json, sys", "print(json.dumps(list(sys.modules)))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_after(*lines: str) -> set[str]:
    """The packages among them."""
    return {name.split(".")[0] for name in all_modules_after(*lines)}


def test_import_is_light() -> None:
    assert not {"torch", "numpy", *LAZY} & modules_after("import penstock")


def test_llm_needs_few_packages_only(config_folder: str) -> None:
    """At import, and also to run a model on token ids. What torch itself brings along is torch's."""
    theirs = modules_after("import torch, numpy, safetensors.torch, tokenizers, msgspec")
    ours = modules_after(
        "from penstock import LLM, AsyncLLM, SamplingParams",
        f"llm = LLM({config_folder!r}, load_format='dummy', skip_tokenizer_init=True, threads=1)",
        "llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)",
    )
    assert {"torch", "numpy", "safetensors", "tokenizers", "penstock"} <= ours
    brought = {name for name in ours - theirs if name not in sys.stdlib_module_names}
    assert brought == {"penstock"}


def test_generating_brings_no_compiler(config_folder: str) -> None:
    """torch._dynamo takes a second to import, and some of torch's decorators do it on their first call. The second step
    of a shape is recorded, the third replayed."""
    loaded = all_modules_after(
        "from penstock import LLM, SamplingParams",
        f"llm = LLM({config_folder!r}, load_format='dummy', skip_tokenizer_init=True, threads=1)",
        "llm.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)",
    )
    assert "torch" in loaded and "penstock.runner.cpu.tapes" in loaded
    assert not {"torch._dynamo", "torch._inductor"} & loaded


def test_api_process_has_no_tensors() -> None:
    loaded = all_modules_after("import penstock.server.app, penstock.server.run")
    assert "fastapi" in loaded
    ours = {f"penstock.{name}" for name in ("runner", "models", "layers", "quant", "ops", "sampling", "assemble")}
    assert not {"torch", "numpy", *ours} & loaded


def test_public_names() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name).__name__ == name
    with pytest.raises(AttributeError, match="'Engine'"):
        penstock.__getattr__("Engine")
