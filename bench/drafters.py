"""Tokens per step of each drafting method: `python -m bench.drafters --out bench/results/drafters-DATE.json`.

Drafts are verified as long as they are likely, whatever a step costs, so the figures are the texts' and not the
machine's. `--draw docs/speculation.svg` draws those of a file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.picture import pyplot, save

MIN_CHANCE = 0.3  # of a draft token, with all before it; of lookahead all are verified, else it has nothing to learn
NUM_REQUESTS = 1  # of each kind, after one that is not counted
MAX_OUTPUT = 80
METHODS = ("ngram", "suffix", "corpus", "lookahead", "auto")
KINDS = ("summary", "code edit", "extraction", "structured", "chat")
COLOURS = {"ngram": "#d1495b", "suffix": "#30638e", "corpus": "#edae49", "lookahead": "#00798c", "auto": "#8d6a9f"}


def measure(model: str, methods: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    from penstock.commands.bench_texts import WORKLOADS

    workloads = [workload for workload in WORKLOADS if workload.name in KINDS and workload.make is not None]
    texts = [one.make(random.Random(f"corpus {i}")) for one in workloads for i in range(8) if one.make is not None]
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    cases = []
    for method in methods:
        config = {"method": "suffix" if method == "corpus" else method}
        if method == "corpus":
            config["corpus"] = str(folder / "corpus.txt")
        cases += _measure_method(model, method, config, workloads)
    return cases


def _measure_method(model: str, method: str, config: Any, workloads: Sequence[Any]) -> list[dict[str, Any]]:
    from penstock import LLM

    cases = []
    with LLM(model, progress=False, max_model_len=2048, speculative_config=config) as llm:
        _verify_likely(llm, 0.0 if method == "lookahead" else MIN_CHANCE)
        for workload in workloads:
            for number in range(NUM_REQUESTS + 1):
                if number <= 1:
                    before, num_tokens = llm.stats(), 0
                num_tokens += _run(llm, workload, number)
            after = llm.stats()
            counts = {name: after[name] - before[name] for name in ("num_steps", "num_draft_tokens")}
            counts["num_accepted_tokens"] = after["num_accepted_tokens"] - before["num_accepted_tokens"]
            cases.append({"method": method, "kind": workload.name, "num_tokens": num_tokens, **counts})
            print(cases[-1], file=sys.stderr, flush=True)
    return cases


def _verify_likely(llm: Any, least: float) -> None:
    from penstock.engine.scheduling.speculation import SpeculationController

    class Likely(SpeculationController):
        min_chance = least

        def choose(self, drafts: Sequence[Sequence[Any]], num_rows: int, room: int, is_mixed: bool) -> list[int]:
            return [len(line) for line in drafts]

    llm.service.engine.scheduler._speculation = Likely()


def _run(llm: Any, workload: Any, number: int) -> int:
    """Run one request; returns its tokens."""
    from penstock import SamplingParams, StructuredOutputsParams
    from penstock.commands.bench_texts import SCHEMA

    grammar = StructuredOutputsParams(json=SCHEMA) if workload.name == "structured" else None
    params = SamplingParams(
        max_tokens=min(MAX_OUTPUT, workload.num_output), seed=number, structured_outputs=grammar, **workload.params
    )
    text = workload.make(random.Random(f"{workload.name} {number}"))
    output = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)[0]
    return len(output.outputs[0].token_ids)


def draw(document: dict[str, Any], path: Path) -> None:
    figure, panel = pyplot().subplots(layout="constrained", figsize=(9, 3.2))
    methods = [method for method in METHODS if any(case["method"] == method for case in document["cases"])]
    width = 0.8 / len(methods)
    for at, method in enumerate(methods):
        cases = {case["kind"]: case for case in document["cases"] if case["method"] == method}
        values = [cases[kind]["num_tokens"] / cases[kind]["num_steps"] for kind in KINDS]
        places = [place + width * (at - (len(methods) - 1) / 2) for place in range(len(KINDS))]
        panel.bar(places, values, width, label=method, color=COLOURS[method])
    panel.set_xticks(range(len(KINDS)), KINDS)
    panel.axhline(1, color="#888888", linewidth=0.8)
    panel.set_ylabel("tokens per step")
    panel.set_title(f"{document['model']}: drafts verified while their chance is {MIN_CHANCE} or more", fontsize=10)
    panel.legend(fontsize=8, ncols=len(methods), loc="upper right")
    save(figure, path)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--out", type=Path, help="measure, and write this file")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "PICTURE"), help="draw the figures of a file")
    options = parser.parse_args(words)
    if options.out:
        with tempfile.TemporaryDirectory() as folder:
            document = {"model": options.model, "cases": measure(options.model, options.methods, Path(folder))}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.draw:
        draw(json.loads(options.draw[0].read_text()), options.draw[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
