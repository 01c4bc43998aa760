"""What combines with what: each cell is a test of test_combinations.py, and docs/combinations.md is made from this.

`python -m tests.same_tokens.combinations` writes the table into the page.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
BEGIN, END = "<!-- begin: made by tests.same_tokens.combinations -->", "<!-- end -->"

SAME = "same"  # as without drafts, bit for bit; drafts are verified
NONE = "no drafts"  # works, and drafts nothing
REFUSED = "refused"  # if asked for; off otherwise
DEVICE = "on the device"  # drafts are verified there

TEXT_DRAFTERS = ("ngram", "suffix", "prediction", "lookahead", "corpus", "draft_fn", "grammar", "tree")
MODEL_DRAFTERS = ("draft_model", "self", "medusa", "eagle", "eagle3", "mtp")
DRAFTERS = (*TEXT_DRAFTERS, *MODEL_DRAFTERS)
COLUMNS = (
    "sampling with a seed",
    "penalties",
    "DRY, mirostat, XTC",
    "log probabilities",
    "prompt log probabilities",
    "n > 1",
    "best_of",
    "structured output",
    "logits processors",
    "stop tokens, min_tokens, bad words",
    "stop strings",
    "streams",
    "prefix cache",
    "restored prefixes",
    "chunked prompts",
    "preemption",
    "int8 KV cache",
    "int8 KV cache but for a layer",
    "latent attention",
    "LoRA adapters",
    "beams",
    "GPU",
    "recurrent models",
    "embedding models",
)
EXCEPTIONS = {
    **{(drafter, "beams"): NONE for drafter in DRAFTERS},
    **{(drafter, "recurrent models"): REFUSED for drafter in DRAFTERS},
    **{(drafter, "embedding models"): REFUSED for drafter in DRAFTERS},
    **{(drafter, "GPU"): DEVICE for drafter in DRAFTERS},
    ("grammar", "GPU"): NONE,
    ("tree", "GPU"): REFUSED,
}


def find_word(drafter: str, column: str) -> str:
    return EXCEPTIONS.get((drafter, column), SAME)


def format_table() -> str:
    lines = [f"| | {' | '.join(DRAFTERS)} |", f"|---|{'---|' * len(DRAFTERS)}"]
    lines += [f"| {column} | {' | '.join(find_word(drafter, column) for drafter in DRAFTERS)} |" for column in COLUMNS]
    return "\n".join(lines)


def replace_table(page: str) -> str:
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{format_table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
