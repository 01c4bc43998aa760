"""The cost of LoRA adapters on a CPU: `python -m bench.lora cost MODEL` and `python -m bench.lora many MODEL`.

`cost`: decoding with an adapter on all linears and without any, by turns, at batch 1 and 16. `many`: requests that
choose among many adapters by Zipf's law, against the same requests with one adapter. Adapters are random. Both report
seconds of the clock and of the processor: the latter depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock import LLM, LoRARequest, SamplingParams

PARTS = {
    "self_attn.q_proj": ("width", "queries"),
    "self_attn.k_proj": ("width", "keys"),
    "self_attn.v_proj": ("width", "keys"),
    "self_attn.o_proj": ("queries", "width"),
    "mlp.gate_proj": ("width", "ffn"),
    "mlp.up_proj": ("width", "ffn"),
    "mlp.down_proj": ("ffn", "width"),
}
TOKENS, PROMPT = 48, 16


def write_adapter(folder: Path, llm: LLM, rank: int, seed: int) -> LoRARequest:
    """Write a random adapter on all linears of a model that names them as Llama does."""
    spec = llm.service.assembly.spec
    merges = spec.merges()
    parts = dict((*merges["layers.0.attention.qkv"].parts, *merges["layers.0.mlp.gate_up"].parts))
    sizes = {"width": spec.width, "queries": parts["q"], "keys": parts["k"], "ffn": parts["gate"]}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(spec.num_layers):
        for name, (num_in, num_out) in PARTS.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for half, shape in (("A", (rank, sizes[num_in])), ("B", (sizes[num_out], rank))):
                values = 0.01 * torch.randn(shape, generator=generator)
                tensors[f"{module}.lora_{half}.weight"] = values.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in PARTS]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed + 1, str(folder))


def run(llm: LLM, loras: list[LoRARequest | None], prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Return the seconds of the clock and of the processor."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, speculation=False)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 20_000) for _ in range(length)] for _ in range(count)]


def measure_cost(llm: LLM, folder: Path, rank: int, turns: int) -> None:
    lora = write_adapter(folder / "one", llm, rank, 0)
    for size in (1, 16):
        ratios = []
        for turn in range(turns + 1):
            prompts = make_prompts(size, PROMPT, turn)
            asked: list[list[LoRARequest | None]] = [[None] * size, [lora] * size]
            found = [run(llm, loras, prompts, TOKENS) for loras in (asked if turn % 2 else asked[::-1])]
            plain, adapted = found if turn % 2 else found[::-1]
            if turn:  # the first one records steps
                ratios.append([b / a for a, b in zip(plain, adapted)])
        clock, processor = (statistics.median(one) for one in zip(*ratios))
        told = {"batch": size, "rank": rank, "clock": round(clock, 3), "processor": round(processor, 3)}
        print(json.dumps({**told, "each": [round(one, 3) for _, one in ratios]}), flush=True)


def measure_many(llm: LLM, folder: Path, rank: int, num_loras: int, num_requests: int, turns: int) -> None:
    loras = [write_adapter(folder / f"lora-{index}", llm, rank, index) for index in range(num_loras)]
    rng = random.Random(1)
    weights = [1 / (index + 1) for index in range(num_loras)]
    chosen: list[LoRARequest | None] = [*rng.choices(loras, weights, k=num_requests)]
    prompts = make_prompts(num_requests, PROMPT, 2)
    run(llm, [loras[0]] * 32, prompts[:32], 8)
    memory = llm.service.engine.loras.memory
    found: dict[str, list[tuple[float, float]]] = {"one": [], "many": []}
    for _ in range(turns):
        found["one"].append(run(llm, [loras[0]] * num_requests, prompts, 16))
        found["many"].append(run(llm, chosen, prompts, 16))
    clock, processor = (statistics.median(a[i] / b[i] for a, b in zip(found["one"], found["many"])) for i in (0, 1))
    told = {"adapters": num_loras, "requests": num_requests, "used": len({one.lora_name for one in chosen if one})}
    reads = {"reads": memory.num_loads, "evictions": memory.num_evictions}
    print(json.dumps({**told, **reads, "clock": round(clock, 3), "processor": round(processor, 3)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["cost", "many"])
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization")
    given = parser.parse_args()
    options = {"load_format": given.load_format, "quantization": given.quantization}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            given.model, enable_lora=True, max_lora_rank=given.rank, max_loras=given.max_loras, threads=1,
            max_cpu_loras=given.max_cpu_loras, max_num_seqs=32, max_model_len=512, device="cpu",
            skip_tokenizer_init=True, progress=False, **options,
        ) as llm,
    ):  # fmt: skip
        if given.kind == "cost":
            measure_cost(llm, Path(folder), given.rank, given.turns)
        else:
            measure_many(llm, Path(folder), given.rank, given.adapters, given.requests, min(3, given.turns))


if __name__ == "__main__":
    main()
