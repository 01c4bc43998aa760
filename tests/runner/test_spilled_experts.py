"""A mixture of experts of twice the memory that a control group allows runs, with the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.experts import Shape, write
from penstock.models import load
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from penstock.quant.mapped import move_to_file
from tests.models.paged import Paged

SMALL = Shape(width=256, hidden=256, layers=2, heads=2, kv_heads=1, experts=8, chosen=2)
LARGE = Shape(width=2048, hidden=512, layers=12, heads=16, kv_heads=4, experts=128, chosen=4)
LIMIT = 1200 << 20  # Python with torch takes 300 MiB of it


def answers(path: Path) -> list[torch.Tensor]:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, spec_from_config(checkpoint.config, 64), dtype=None)
    assert isinstance(model, Decoder)
    return [torch.stack(row.logits) for row in Paged(model).run([[1, 2, 3], [4]], 6, chunk=4)]


def test_experts_in_a_file_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(SMALL, tmp_path / "model.gguf")
    held = answers(tmp_path / "model.gguf")
    moved: list[int] = []

    def note(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
        moved.append(tensor.nbytes)
        assert folder == tmp_path
        return move_to_file(tensor, folder)

    monkeypatch.setattr("penstock.quant.mapped.move_to_file", note)
    monkeypatch.setattr(load, "free_memory_bytes", lambda: 1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(held, answers(tmp_path / "model.gguf"), strict=True))
    experts = 2 * 8 * 3 * 256 * 256 * 9 // 16  # of both layers, in Q4_K
    assert sum(moved) >= experts and [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with the limit."""
    roots = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    for root, limit in roots.items():
        place = root / f"penstock-test-{os.getpid()}"
        try:
            place.mkdir()
            (place / limit).write_text(str(LIMIT))
        except OSError:
            if place.exists():
                place.rmdir()
            continue
        yield place
        place.rmdir()
        return
    pytest.skip("no memory limit can be set here: that needs a writable control group")


RUN = """
import json, sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from penstock import LLM, SamplingParams
start = time.perf_counter()
llm = LLM(model=sys.argv[2], skip_tokenizer_init=True, progress=False, max_num_seqs=1, max_model_len=64)
loaded = time.perf_counter()
params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
print(json.dumps({"load_s": loaded - start, "tokens_per_s": 16 / (time.perf_counter() - loaded)}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_of_twice_the_memory_runs(tmp_path: Path, group: Path) -> None:
    write(LARGE, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").stat().st_size > 2 * LIMIT
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(group), str(tmp_path / "model.gguf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"loaded in {found['load_s']:.0f} s, {found['tokens_per_s']:.2f} tokens/s")
    time.sleep(0.2)  # until the group is empty
