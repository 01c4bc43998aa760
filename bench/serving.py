"""Load on one running server: `python -m bench.serving --url http://127.0.0.1:8000 --model smollm2`.

Any server with OpenAI's chat interface will do; `bench.serving_compare` starts several and lets them take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.bar import Bar
from bench.load.document import header, now, write
from bench.load.options import add_options, check, trial_options
from bench.load.table import markdown, notes
from bench.load.trial import ServerFailed, Trial, calibrate, server_version
from bench.load.wire import Target
from bench.load.words import TOKENS_PER_WORD
from bench.load.workload import WORKLOADS
from bench.quiet import busy_share

Document = dict[str, Any]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description="Measure a server under load.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that the server knows (default: smollm2)")
    parser.add_argument("--api-key", help="sent as a bearer token; it is not written anywhere")
    parser.add_argument(
        "--workload", choices=tuple(WORKLOADS), default="burst-new-prefix", help="what is asked (default: %(default)s)"
    )
    add_options(parser)
    chosen = parser.parse_args(words)
    check(parser, chosen)
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    chosen = parse(words)
    try:
        document = run(chosen)
    except (ServerFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.output:
        write(chosen.output, document)
    print(markdown(document))
    return 0 if all(sound(row["figures"]) for row in document["phases"]) else 1


def run(chosen: argparse.Namespace) -> Document:
    target = Target.parse(chosen.url, chosen.api_key)
    document = header("serving", busy_share(chosen.pause or 0.1))
    factor = chosen.tokens_per_word or calibrate(target, chosen.model)
    with Bar("request") as bar:
        trial = Trial(
            model=chosen.model,
            tokens_per_word=factor or TOKENS_PER_WORD,
            note=bar.note,
            begin=bar.begin,
            advance=bar.advance,
            **trial_options(chosen.workload, chosen, target),
        )
        phases = trial.run(f"{chosen.nonce}/{chosen.seed}")
    return document | {
        "url": chosen.url,
        "model": chosen.model,
        "server_version": server_version(target),
        "workload": asdict(trial.workload),
        "overload": trial.overload,
        "seed": chosen.seed,
        "nonce": chosen.nonce,
        "tokens_per_word": trial.tokens_per_word,
        "calibrated": bool(factor and not chosen.tokens_per_word),
        "extra": chosen.extra,
        "phases": phases,
        "notes": [*chosen.note, *notes(phases, document["busy_share"])],
        "complete": True,
        "ended": now(),
    }


def sound(figures: Document) -> bool:
    """Something was answered, nothing was broken off, and no length was wrong; a refusal is an answer."""
    return figures["num_ok"] > 0 and not (
        figures["num_wrong_length"] or figures["num_disconnected"] or figures["num_failed"]
    )


if __name__ == "__main__":
    sys.exit(main())
