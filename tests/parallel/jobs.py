"""What the rank processes of the tests are asked to do: functions of a mesh and plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, LoRARequest, SamplingParams
from penstock.cache.group import group_layers
from penstock.engine.executor import LoadLora
from penstock.models.decoder import Decoder, Encoder
from penstock.models.files import open_checkpoint, read_config
from penstock.models.layer import Shapes
from penstock.models.names import Names
from penstock.models.pooling import Pooling
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from penstock.parallel import Mesh
from penstock.passes.load import load_lowered
from penstock.passes.lora_table import LoraTable
from penstock.passes.outline import weight_bytes
from penstock.passes.shard import shard
from penstock.runner.cpu.runner import Runner
from penstock.runner.loras import LoraBank
from penstock.runner.memory import DTYPES, BlockMemory
from penstock.runner.step import Step
from tests.models.paged import Paged
from tests.models.stored import Stored
from tests.same_tokens.roads import answer as road
from tests.same_tokens.roads import tiny_llm

LENGTHS = (1, 6, 21)
NUM_NEW = 5
CHUNK = 7


def describe(architecture: str, variant: int = 0, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **FAMILIES[architecture].like[variant], **changes}


def make_spec(config: dict[str, Any]) -> ModelSpec:
    """Describe a tiny model whose checkpoint has our names of all parameters."""
    spec = spec_from_config(config)
    modules = [name.rpartition(".")[0] for name in spec.parameters()]
    inner = [name.split(".", 2)[2] for name in modules if name.startswith("layers.")]
    names = Names(stack="layers", model={name: name for name in modules}, layer={name: name for name in inner})
    return replace(spec, names=names)


def make_checkpoint(config: dict[str, Any], shapes: Shapes) -> Stored:
    """Random weights: matrices wide enough that logits differ, norms about 1, biases about 0."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        tensors[name] = (1.0 + 0.2 * noise) if is_norm else 0.15 * noise
    return Stored(config, tensors)


def load(mesh: Mesh, config: dict[str, Any], by: str, expert_parallel: bool = False, **options: Any) -> Decoder:
    """Load a rank's part of a tiny model; all of it on a mesh of one."""
    spec = make_spec(config)
    checkpoint = make_checkpoint(config, spec.parameters())
    if mesh.size > 1:
        spec, _ = shard(spec, mesh.rank, mesh.size, by, expert_parallel)  # type: ignore[arg-type]
    model = load_lowered(checkpoint, spec, mesh=mesh, **options)
    assert isinstance(model, Decoder)
    return model


def embed(mesh: Mesh, config: dict[str, Any], by: str) -> Any:
    """Embed three sequences with an encoder."""
    spec = make_spec(config)
    checkpoint = make_checkpoint(config, spec.parameters())
    if mesh.size > 1:
        spec, _ = shard(spec, mesh.rank, mesh.size, by)  # type: ignore[arg-type]
    pooling = Pooling("mean", True)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.models.load.read_pooling", lambda path: pooling)
        model = load_lowered(checkpoint, spec, mesh=mesh)
        assert isinstance(model, Encoder)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
        ids = torch.tensor([token for prompt in prompts(spec.vocab_size) for token in prompt])
        positions = torch.cat([torch.arange(count) for count in LENGTHS])
        step = Step(ids, positions, [], [], starts, lengths)
        return model.pool(model.forward(step), starts).numpy()


def load_folder(mesh: Mesh, folder: str, by: str, num_loras: int = 0, **options: Any) -> tuple[Decoder, LoraTable]:
    """Load a rank's part of a model folder or file; without weights, random ones."""
    path = Path(folder)
    has_weights = path.is_file() or any(path.glob("*.safetensors"))
    checkpoint = open_checkpoint(path) if has_weights else None
    spec = spec_from_config(checkpoint.config if checkpoint else read_config(path), 128)
    if mesh.size > 1:
        spec, _ = shard(spec, mesh.rank, mesh.size, by)  # type: ignore[arg-type]
    table = LoraTable(spec, num_loras)
    options = {"dtype": None if has_weights else torch.float32, "dummy_seed": None if has_weights else 0, **options}
    model = load_lowered(checkpoint, spec, mesh=mesh, loras=table if num_loras else None, **options)
    assert isinstance(model, Decoder)
    return model, table


def answer_folder(mesh: Mesh, folder: str, by: str = "out", **options: Any) -> Any:
    """Answer some prompts with a model that is stored."""
    with torch.inference_mode():
        return run(load_folder(mesh, folder, by, **options)[0])


def replace_runner(llm: LLM, model: Decoder, loras: LoraBank | None = None) -> Runner:
    """Put a rank's runner where an engine has its own: all ranks plan the same steps."""
    engine: Any = llm.service.engine
    memory = engine.executor.memory
    kept = next(name for name, dtype in DTYPES.items() if dtype == memory.dtype)
    grouping = group_layers(model.spec.states(memory.layout), memory.block_size)
    engine.executor = Runner(model, BlockMemory(len(memory.blocks), memory.block_size, grouping, kept), loras=loras)
    made: Runner = engine.executor
    return made


def replay(mesh: Mesh, folder: str, by: str) -> Any:
    """Answer call by call, then as tapes are recorded and replayed → whether all is the same, and the answers."""
    prompts, params = [[5, 6, 7], [8], [9] * 20, [3, 4]], []
    for count in (12, 8, 12, 5):
        shared: dict[str, Any] = dict(logprobs=1, ignore_eos=True, detokenize=False)
        params.append(SamplingParams(max_tokens=count, temperature=0.7, seed=1, **shared))
    with tiny_llm(folder, max_num_batched_tokens=23, seed=0) as llm:
        if mesh.size > 1:
            replace_runner(llm, load_folder(mesh, folder, by)[0])
        tapes = llm.service.engine.executor.tapes  # type: ignore[attr-defined]
        found = []
        for tapes.enabled in (False, True, True, True):
            llm.reset_prefix_cache()
            found.append([road(output) for output in llm.generate(prompts, params, use_tqdm=False)])
        counts = tapes.num_recorded, tapes.num_replayed
        return found[0] if all(each == found[0] for each in found) else None, counts, tapes.obstacles


def adapt(mesh: Mesh, folder: str, adapters: Sequence[str], by: str) -> Any:
    """Answer the same prompts with each adapter, with none and with two at once, in one batch."""
    uses = [LoRARequest(f"lora-{number}", number + 1, path) for number, path in enumerate(adapters)]
    asked = [None, *uses, uses[:2]]
    shared: dict[str, Any] = dict(logprobs=1, ignore_eos=True, temperature=0.0, max_tokens=8)
    options: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, progress=False, speculative_config=None)
    limits = dict(enable_lora=True, max_lora_rank=32, max_loras=8, max_model_len=128, kv_cache_tokens=4096)
    with LLM(folder, **options, **limits) as llm:  # type: ignore[arg-type]
        if mesh.size > 1:
            model, table = load_folder(mesh, folder, by, 8, dtype=torch.float32)
            bank = LoraBank(table, 32)
            for use in uses:  # the engine's own runner gets the messages
                assert not bank.load(LoadLora(use.lora_int_id, use.lora_path)).result().error
            replace_runner(llm, model, bank)
        found = [[5, 6, 7, 8, 9, 10, 11][: 2 + i] for i in range(len(asked))]
        outputs = llm.generate(found, SamplingParams(**shared, detokenize=False), use_tqdm=False, lora_request=asked)
        return [road(output) for output in outputs]


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def answer(mesh: Mesh, config: dict[str, Any], by: str = "out", checks_ends: bool = False, **options: Any) -> Any:
    """Answer some prompts, in chunks of random sizes → each row's tokens and logits, and the bytes of the weights."""
    with torch.inference_mode():
        return run(load(mesh, config, by, **options), checks_ends)


def run(model: Decoder, checks_ends: bool = False) -> Any:
    driver = Paged(model)
    driver.checks_ends = checks_ends
    rows = driver.run(prompts(model.spec.vocab_size), NUM_NEW, CHUNK)
    return {
        "tokens": [row.tokens for row in rows],
        "logits": [torch.stack(row.logits).numpy() for row in rows],
        "bytes": weight_bytes(model),
    }


def same_bits(a: Any, b: Any) -> bool:
    """True for answers whose tokens and logits are the same bits."""
    words = [[one.view(np.int32) for one in each["logits"]] for each in (a, b)]
    return a["tokens"] == b["tokens"] and all(map(np.array_equal, *words))
