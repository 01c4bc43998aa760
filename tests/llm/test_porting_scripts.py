"""Scripts that make the calls of vLLM's documented examples run with the name of the package changed, and no more."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.llm import tiny

SCRIPTS = sorted((Path(__file__).parents[1] / "porting").glob("*.py"))
SLOW = ("caching", "refused")  # what they call is tested elsewhere, too


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose end is the tokenizer's own."""
    from tests.models import oracle

    folder: Path = tmp_path_factory.mktemp("models") / "decoder"
    config = {
        **tiny.FAMILIES["LlamaForCausalLM"].like[0],
        "vocab_size": 300,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
    }
    oracle.save(oracle.make("LlamaForCausalLM", config, seed=5), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tiny.write_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_script(path: Path, decoder: str, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = re.sub(r"\bvllm\b", "penstock", path.read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", [path.name, encoder if path.stem == "pooling" else decoder])
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 9
