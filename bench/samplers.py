"""The cost of one row's samplers for the others on a GPU: `python -m bench.samplers`.

Tokens per second of a batch of 64, by turns, in which one row asks for nothing, for a sampler that the device has, or
for one that only the host has.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from bench.gpu_case import write_shape
from bench.gpu_sets import requests

SHAPE, NUM_ROWS, NUM_TURNS = "qwen3-0.6b", 64, 3
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top_p": {"top_p": 0.9},
    "dry": {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    "xtc": {"xtc_probability": 0.5},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "dynatemp": {"dynatemp_range": 0.5},
    "repeat_last_n": {"repetition_penalty": 1.1, "repeat_last_n": 64},
    "host (typical_p)": {"typical_p": 0.9},
    "nothing, long": {},
    "dry, long": {"dry_multiplier": 1e-6, "dry_base": 1.1, "dry_sequence_breakers": ()},
}
LONG = [7] * 16_000  # one token over and over: every place repeats the text's end


def main() -> None:
    from penstock import LLM, SamplingParams

    llm = LLM(
        model=write_shape(SHAPE),
        load_format="dummy",
        skip_tokenizer_init=True,
        progress=False,
        max_model_len=17000,
        max_num_seqs=256,
        seed=0,
    )
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(NUM_TURNS + 1):
        for name, asked in KINDS.items():
            prompts = [prompt for prompt, _ in requests("256x128in512out", turn)[:NUM_ROWS]]
            if name.endswith("long"):
                prompts[0] = LONG
            params = [
                SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=256, seed=i, **(asked if i == 0 else {}))
                for i in range(NUM_ROWS)
            ]
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            made = sum(len(output.outputs[0].token_ids) for output in outputs)
            if turn:  # the first one records steps
                found[name].append(made / seconds)
    plain = statistics.median(found["nothing"])
    for name, values in found.items():
        middle = statistics.median(values)
        print(
            json.dumps(
                {
                    "one row asks for": name,
                    "out_tok_s": round(middle),
                    "of plain": round(middle / plain, 3),
                    "each": [round(value) for value in values],
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
