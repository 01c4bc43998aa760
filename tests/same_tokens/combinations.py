"""What combines with what: each cell is a test of test_combinations.py or test_layouts.py, and docs/combinations.md is
made from this.

`python -m tests.same_tokens.combinations` writes the tables into the page.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
BEGIN_LAYOUTS = "<!-- begin: layouts, made by tests.same_tokens.combinations -->"
BEGIN, END = "<!-- begin: made by tests.same_tokens.combinations -->", "<!-- end -->"

SAME = "same"  # as without drafts, bit for bit; drafts are verified
NONE = "no drafts"  # works, and drafts nothing
REFUSED = "refused"  # if asked for; off otherwise
DEVICE = "on the device"  # drafts are verified there
HOST = "on the host"  # so are these

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
    "int4 KV cache",
    "latent attention",
    "experts",
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
    ("grammar", "GPU"): HOST,
    ("tree", "GPU"): REFUSED,
}

# of one server, two replicas of it, or a router in front of two
LAYOUTS = (
    "2 tensor ranks",
    "2 stages",
    "2 stages of 2 tensor ranks",
    "2 replicas",
    "2 replicas of 2 tensor ranks",
    "prefill and decode apart",
    "router",
)
LAYOUT_ROWS = (
    "sampling with a seed",
    "penalties",
    "DRY, mirostat, XTC",
    "log probabilities",
    "prompt log probabilities",
    "n > 1",
    "best_of",
    "structured output",
    "stop tokens, min_tokens, bad words",
    "stop strings",
    "streams",
    "prefix cache",
    "many at once",
    "chunked prompts",
    "LoRA adapters",
    "beams",
    "sessions",
)


def find_word(drafter: str, column: str) -> str:
    return EXCEPTIONS.get((drafter, column), SAME)


def format_table() -> str:
    lines = [f"| | {' | '.join(DRAFTERS)} |", f"|---|{'---|' * len(DRAFTERS)}"]
    lines += [f"| {column} | {' | '.join(find_word(drafter, column) for drafter in DRAFTERS)} |" for column in COLUMNS]
    return "\n".join(lines)


def format_layouts() -> str:
    lines = [f"| | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
    lines += [f"| {row} | {' | '.join([SAME] * len(LAYOUTS))} |" for row in LAYOUT_ROWS]
    return "\n".join(lines)


def replace_table(page: str) -> str:
    for begin, table in ((BEGIN, format_table()), (BEGIN_LAYOUTS, format_layouts())):
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{table}\n{END}{rest.split(END, 1)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
