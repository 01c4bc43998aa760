"""Decoding speed of a mixture of experts beside a dense model that reads as many bytes a token, on a CPU.

`python -m bench.experts` writes two random Q4_K GGUF files, loads both, and lets them take turns. Random weights route
evenly, so that sequences share few experts: trained routers share more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)])  # Q4_K: 256 values
VOCABULARY, HEAD_SIZE, CONTEXT = 4096, 128, 1024


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen 3 model, dense where it has no experts."""

    width: int
    hidden: int  # of one expert, or of the dense FFN
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    chosen: int = 0

    def dense(self) -> Shape:
        """The dense model that reads as many bytes a token."""
        return replace(self, hidden=self.hidden * self.chosen, experts=0, chosen=0)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "token_embd.weight", (VOCABULARY, self.width)
        yield "output_norm.weight", (self.width,)
        yield "output.weight", (VOCABULARY, self.width)
        q, kv, stack = self.heads * HEAD_SIZE, self.kv_heads * HEAD_SIZE, (self.experts,) if self.experts else ()
        end = "_exps" if self.experts else ""
        for layer in range(self.layers):
            names: dict[str, tuple[int, ...]] = {
                "attn_norm": (self.width,),
                "attn_q": (q, self.width),
                "attn_k": (kv, self.width),
                "attn_v": (kv, self.width),
                "attn_q_norm": (HEAD_SIZE,),
                "attn_k_norm": (HEAD_SIZE,),
                "attn_output": (self.width, q),
                "ffn_norm": (self.width,),
                f"ffn_gate{end}": (*stack, self.hidden, self.width),
                f"ffn_up{end}": (*stack, self.hidden, self.width),
                f"ffn_down{end}": (*stack, self.width, self.hidden),
            }
            if self.experts:
                names["ffn_gate_inp"] = (self.experts, self.width)
            yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in names.items())


def write(shape: Shape, path: Path) -> None:
    """Write the model with random weights of a fixed seed."""
    import gguf

    architecture = "qwen3moe" if shape.experts else "qwen3"
    writer, random = gguf.GGUFWriter(path, architecture, use_temp_file=True), np.random.default_rng(0)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.hidden)
    for name, size in shape.tensors():
        if len(size) == 1 or "gate_inp" in name:
            values = np.ones(size, np.float32) if len(size) == 1 else random.standard_normal(size, np.float32)
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, _blocks(random, size), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Random blocks whose values are about 0.02 in size, around zero."""
    blocks = np.empty((*size[:-1], size[-1] // 256), BLOCK)
    blocks["scales"] = random.integers(0, 256, blocks["scales"].shape, np.uint8)
    blocks["codes"] = random.integers(0, 256, blocks["codes"].shape, np.uint8)
    blocks["scale"], blocks["minimum"] = 0.00015, 0.00112
    return blocks.view(np.uint8)


def load(path: Path, threads: int) -> Any:
    from penstock import LLM

    return LLM(
        model=str(path), skip_tokenizer_init=True, progress=False, max_num_seqs=16, max_model_len=CONTEXT,
        threads=threads, enable_prefix_caching=False,
    )  # fmt: skip


def measure(llm: Any, sequences: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of the clock and of the processor of so many sequences that decode together, their prompts left
    out."""
    from penstock import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + j) % VOCABULARY for j in range(8)]} for i in range(sequences)]

    def run(count: int) -> tuple[float, float]:
        params = SamplingParams(
            max_tokens=count, temperature=1.0, seed=1, ignore_eos=True, detokenize=False, speculation=False
        )
        start, start_cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, time.process_time() - start_cpu

    clock, processor = (sequences * tokens / (long - short) for long, short in zip(run(1 + tokens), run(1)))
    return clock, processor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__)
    for name, default in (("width", 2048), ("hidden", 512), ("layers", 6), ("experts", 128), ("chosen", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    heads = chosen.width // HEAD_SIZE
    sparse = Shape(chosen.width, chosen.hidden, chosen.layers, heads, max(1, heads // 4), chosen.experts, chosen.chosen)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for name, shape in (("experts", sparse), ("dense", sparse.dense())):
            write(shape, Path(folder) / f"{name}.gguf")
            models[name] = load(Path(folder) / f"{name}.gguf", chosen.threads)
        for _ in range(chosen.rounds):
            for name, llm in models.items():
                for sequences in (1, 16):
                    found.setdefault((name, sequences), []).append(measure(llm, sequences, chosen.tokens))
    for kind, name in enumerate(("clock", "processor")):
        report(name, {key: [one[kind] for one in values] for key, values in found.items()})


def report(kind: str, found: dict[tuple[str, int], list[float]]) -> None:
    speed = {key: statistics.median(values) for key, values in found.items()}
    print(f"by the {kind}:")
    for (name, sequences), value in speed.items():
        spread = f"{min(found[name, sequences]):.1f} to {max(found[name, sequences]):.1f}"
        print(f"{name:>8} × {sequences:2}: {value:7.1f} tok/s  ({spread})")
    print(f"experts / dense, one sequence: {speed['experts', 1] / speed['dense', 1]:.2f}")
    print(f"16 sequences / one, with experts: {speed['experts', 16] / speed['experts', 1]:.2f}")


if __name__ == "__main__":
    main()
