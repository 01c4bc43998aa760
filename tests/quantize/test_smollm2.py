"""What methods keep of a real model: SmolLM2, whose 4-bit file is widened and is the base of all comparisons.

Minutes on two cores; `pytest -s` shows the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api.quality.measure import read_bundled
from penstock.models.files import open_checkpoint
from penstock.quantize.compare import Text, compare
from penstock.quantize.run import quantize
from penstock.quantize.targets import make_target
from penstock.text.tokenizers.tokenizer import load_tokenizer
from tests.agreement.reference import model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_TOKENS, WINDOW = 1536, 512


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that makes a model once, and compares it with the base on the held-out text."""
    path, folder = model_path("smollm2"), tmp_path_factory.mktemp("smollm2")
    base = open_checkpoint(path)
    tokenizer = load_tokenizer(base.tokenizer_source(), str(path))
    learned, held = (tokenizer.encode(read_bundled(f"{name}.txt")) for name in ("calibration", "held_out"))
    windows = [held[first : first + WINDOW] for first in range(0, NUM_TOKENS, WINDOW)]
    text, known = Text(windows, [64] * len(windows)), dict[str, dict[str, float]]()

    def find(name: str, *recipe: str, **options: str) -> dict[str, float]:
        if name not in known:
            out: Path = folder / name
            quantize(base, out, make_target(*recipe, **options), learned, sample=read_bundled("held_out.txt"))  # type: ignore[arg-type]
            known[name] = compare(base, open_checkpoint(out), text).summary()
            print(f"\n{name}: KL {known[name]['kl_mean']:.4f}, perplexity × {known[name]['perplexity_ratio']:.4f}")
        return known[name]

    return find


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_int4_by_gptq_and_awq_beats_rounding(figures, method: str) -> None:
    assert figures(method, "int4", method)["kl_mean"] <= 0.7 * figures("rtn", "int4", "rtn")["kl_mean"]


def test_smooth_8_bits_cost_less_than_a_percent(figures) -> None:
    assert figures("w8a8", "w8a8", "smoothquant")["perplexity_ratio"] == pytest.approx(1, abs=0.01)


def test_2_4_by_sparsegpt_beats_wanda_beats_magnitude(figures) -> None:
    apart = [
        figures(prune, "bf16", sparsity="2:4", prune=prune)["kl_mean"] for prune in ("sparsegpt", "wanda", "magnitude")
    ]
    assert apart == sorted(apart)


def test_k_quants_keep_the_model(figures) -> None:
    """Rows of 576 fall back to blocks of 32; those of 1,536 are K-quants."""
    assert figures("q4.gguf", "gguf:Q4_K_M")["kl_mean"] < 0.05
    assert figures("q8.gguf", "gguf:Q8_0")["kl_mean"] < 0.002
