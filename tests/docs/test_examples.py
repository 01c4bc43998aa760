"""The manual's Python examples: each is executed with a small model, or is an excerpt of the sources."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.hub import list_models
from penstock.models.spec import FAMILIES
from tests.docs.examples import ADDRESS, BY_CLIENTS, read_examples
from tests.llm import tiny
from tests.lora import adapters
from tests.models import oracle
from tests.server.running import RunningServer

ROOT = Path(__file__).parent.parent.parent
EXCERPTS = {"docs/adding-a-model.md": "penstock/models/families", "docs/adding-a-pass.md": "penstock/passes/lower"}
NEEDS_MODELS = pytest.mark.skipif(
    not any(model.path.name.startswith("SmolLM2") for model in list_models()),
    reason="needs the models of `make models`",
)
MISSING = '"model": "eagle3-head"'  # a line that needs a trained head


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def nothing(folder: Path) -> Iterator[dict[str, Any]]:
    yield {}


@contextlib.contextmanager
def lora(folder: Path) -> Iterator[dict[str, Any]]:
    """A tiny model at MODEL, and two adapters."""
    config = {**FAMILIES["LlamaForCausalLM"].like[0], "vocab_size": 300, "max_position_embeddings": 512}
    base = oracle.save(oracle.make("LlamaForCausalLM", config), folder / "MODEL")
    tiny.write_tokenizer(base)
    for name in ("sql", "chat"):
        adapters.write_for_llama(folder / "adapters" / name, json.loads((base / "config.json").read_text()))
    yield {}


@contextlib.contextmanager
def porting(folder: Path) -> Iterator[dict[str, Any]]:
    with LLM("smollm2", max_model_len=256) as llm:
        yield {"llm": llm, "SamplingParams": SamplingParams, "prompts": ["One, two,"], "DIGITS": [30, 31]}


@contextlib.contextmanager
def speculation(folder: Path) -> Iterator[dict[str, Any]]:
    yield {"LLM": LLM, "cache": SimpleNamespace(lookup=lambda tokens: tokens[:1])}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[dict[str, Any]]:
    """A client of a running server, and a file of requests."""
    import time

    from openai import OpenAI

    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(line))
    with RunningServer("smollm2", "--max-model-len", "512", "--data-folder", str(folder / "data")) as server:
        yield {"client": OpenAI(base_url=f"{server.url}/v1", api_key="none"), "time": time}


PAGES: dict[str, Callable[[Path], contextlib.AbstractContextManager[dict[str, Any]]]] = {
    "README.md": nothing,
    "docs/kv-store.md": nothing,
    "docs/lora.md": lora,
    "docs/porting-from-vllm.md": porting,
    "docs/quickstart.md": nothing,
    "docs/serving.md": serving,
    "docs/speculation.md": speculation,
    "docs/structured-output.md": nothing,
}


def test_no_example_is_left_out() -> None:
    pages = {path for path, _ in read_examples()}
    assert pages == {*PAGES, *EXCERPTS, "docs/recipes/frameworks.md"}


@pytest.mark.parametrize("path", EXCERPTS)
def test_excerpts_are_of_the_sources(path: str) -> None:
    sources = [source.read_text() for source in (ROOT / EXCERPTS[path]).glob("*.py")]
    for page, code in read_examples():
        if page == path:
            assert any(code.strip() in source for source in sources), code


@pytest.mark.slow
@NEEDS_MODELS
@pytest.mark.parametrize("path", PAGES)
def test_examples_run(path: str, in_folder: Path) -> None:
    with PAGES[path](in_folder) as names:
        for page, code in read_examples():
            if page == path:
                lines = [line for line in code.splitlines() if MISSING not in line]
                exec(compile("\n".join(lines), path, "exec"), names)


@pytest.mark.slow
@NEEDS_MODELS
def test_framework_examples_run_against_a_server() -> None:
    """Those whose packages are here; `make test-clients` runs them all."""
    examples = [code for page, code in read_examples() if page == "docs/recipes/frameworks.md"]
    imported = [re.findall(r"^(?:from|import) (\w+)", code, re.M) for code in examples]
    assert {names[0] for names in imported} == set(BY_CLIENTS)
    with RunningServer("smollm2", "--max-model-len", "2048") as server:
        for code, names in zip(examples, imported):
            if names[0] in ("openai", "anthropic"):
                exec(compile(code.replace(ADDRESS, server.url), "frameworks.md", "exec"), {"__name__": "example"})
