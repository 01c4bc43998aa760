"""A mixture of experts of twice the memory that a control group allows runs, with the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.experts import Shape, write
from penstock.errors import InvalidModel
from penstock.models import reading
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.load import Options, load_model, match
from penstock.models.reading import count_held_bytes, find_spill
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from penstock.passes.outline import weight_bytes
from penstock.quant import mapped
from penstock.quant.mapped import find_folder, move_to_file
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
    monkeypatch.setattr(reading, "free_memory_bytes", lambda: 1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(held, answers(tmp_path / "model.gguf"), strict=True))
    experts = 2 * 8 * 3 * 256 * 256 * 9 // 16  # of both layers, in Q4_K
    assert sum(moved) >= experts and [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_bytes_are_counted_as_they_will_be_held(
    tmp_path: Path, quantization: str | None, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bf16 model that fits once it is quantized is not spilled; so for its dtypes."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], **FAMILIES["Qwen3MoeForCausalLM"].like[0]}
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32, "num_experts": 16, "vocab_size": 256}
    spec = spec_from_config(config | wide, 64)
    tensors = {
        spec.names.spelling(name): torch.zeros(shape, dtype=torch.bfloat16)
        for name, shape in dict_of_parts(spec).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | wide))
    checkpoint = open_checkpoint(tmp_path)
    options, sources = Options(dtype, quantization), match(checkpoint, spec)
    counted = count_held_bytes(checkpoint, spec, sources, options)
    model = load_model(checkpoint, spec, dtype=dtype, quantization=quantization)
    assert counted == pytest.approx(weight_bytes(model), rel=0.12)
    for free, spills in ((int(1.2 * counted), False), (int(0.8 * counted), True)):
        monkeypatch.setattr(reading, "free_memory_bytes", lambda free=free: free)
        assert (find_spill(checkpoint, spec, sources, options) is not None) == spills


def dict_of_parts(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name the parts that checkpoints store of each parameter."""
    found, merges = {}, spec.merges()
    for name, shape in spec.parameters().items():
        module, _, suffix = name.rpartition(".")
        for part, rows in merges[module].parts if module in merges else ((module.rpartition(".")[2], shape[0]),):
            above = module.rpartition(".")[0]
            found[f"{above}.{part}.{suffix}" if above else f"{part}.{suffix}"] = (rows, *shape[1:])
    return found


def test_experts_are_not_spilled_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, other = tmp_path / "my models", tmp_path / "other"
    for folder in (disk, other):
        folder.mkdir()
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(mapped, "MOUNTS", mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    at = f"{tmp_path}/my\\040models"
    root = "20 1 8:1 / / rw - ext4 /dev/sda rw\n"
    mounts.write_text(root)
    assert find_folder(disk / "model.gguf") == (disk, "")
    mounts.write_text(root + f"21 20 0:3 / {at} rw shared:1 - tmpfs tmpfs rw\n")
    assert find_folder(disk) == (other, "")
    mounts.write_text(root + f"21 20 0:3 / {tmp_path} rw - tmpfs tmpfs rw\n")
    assert find_folder(disk) == (None, f"{disk} is in memory, {other} is in memory")
    write(SMALL, disk / "model.gguf")
    monkeypatch.setattr(reading, "free_memory_bytes", lambda: 1 << 20)
    with pytest.raises(InvalidModel, match=r"needs 0\.0 GiB .* is in memory.*set TMPDIR to a folder on a disk"):
        answers(disk / "model.gguf")


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
