"""What a rank takes while it loads: its share, and no more than a block beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

NUM_LAYERS, SIZE = 12, 4
SCRIPT = """
import json, sys, threading, time
from pathlib import Path
from penstock.models.files import open_checkpoint
from penstock.models.spec import spec_from_config
from penstock.parallel import OneRank
from penstock.passes.load import load_lowered
from penstock.passes.outline import weight_bytes
from penstock.passes.shard import shard

class Alone(OneRank):
    rank, size = 1, int(sys.argv[2])

def read_anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], read_anonymous())

checkpoint = open_checkpoint(Path(sys.argv[1]))
spec = spec_from_config(checkpoint.config)
mesh = Alone() if Alone.size > 1 else OneRank()
if mesh.size > 1:
    spec, _ = shard(spec, mesh.rank, mesh.size, "out")
done, before = threading.Event(), read_anonymous()
peak = [before]
thread = threading.Thread(target=watch)
thread.start()
model = load_lowered(checkpoint, spec, dtype=torch.bfloat16, mesh=mesh)
done.set()
thread.join()
print(json.dumps([peak[0] - before, weight_bytes(model)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 50 M values in 16 bits."""
    made = tmp_path_factory.mktemp("loading")
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(made)
    return str(made)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_peak_memory_of_a_rank_is_its_share(folder: str) -> None:
    """Loading all and cutting then would take the whole model's memory on every rank."""
    found = {}
    for size in (1, SIZE):
        command = [sys.executable, "-c", SCRIPT, folder, str(size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found[size] = json.loads(done.stdout)
    (whole_peak, whole), (peak, share) = found[1], found[SIZE]
    assert share < 1.1 * whole / SIZE
    block = whole / NUM_LAYERS
    assert whole_peak < whole + 4 * block and peak < share + 4 * block, found
    assert peak < 0.6 * whole_peak
