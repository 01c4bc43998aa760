"""`penstock verify`: check this installation's arithmetic with a model against plain float32."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from penstock.commands.flags.options import RANKS, Json, Model, engine_options, open_llm
from penstock.commands.output import Table, write_text

if TYPE_CHECKING:
    from penstock.api.verify.finding import Finding

WRONG = 1  # exit status
MAX_SHOWN = 20  # wrong parts


@engine_options(
    *("speculative_config", "scheduling_policy", "capacity", "parse_special_tokens", "chat_template"), *RANKS
)
def verify(model: Model, as_json: Json = False, *, options: dict[str, Any]) -> None:
    """Check this installation's arithmetic with a model.

    Each op that the model calls is compared with its plain meaning, each layer with plain layers and with float32, and
    a few answers with a float32 model. Exit status 1 means that a part is wrong; the report names it.
    """
    from penstock.api.verify.verify import verify as compare

    findings: list[Finding] = []
    with open_llm(model, {**options, "speculative_config": "off"}) as llm:
        settings = llm.service.assembly.settings
        for finding in compare(llm):
            findings.append(finding)
            if sys.stderr.isatty():
                print(f"\r{finding.part:40}", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
        kernels = _kernels(settings.device)
    wrong = [finding for finding in findings if not finding.is_right]
    if as_json:
        rows = [{**asdict(finding), "right": finding.is_right} for finding in findings]
        facts = {"model": model, "device": settings.device, "kernels": kernels, "right": not wrong, "parts": rows}
        write_text(json.dumps(facts, indent=2).replace("Infinity", '"infinite"') + "\n")
    else:
        write_text(_report(model, settings.device, kernels, findings, wrong))
    if wrong:
        raise typer.Exit(WRONG)


def _kernels(device: str) -> str:
    from penstock.ops import cpu

    return cpu.path() if device == "cpu" else "Triton"


def _report(model: str, device: str, kernels: str, findings: list[Finding], wrong: list[Finding]) -> str:
    table = Table("parts", "test", "compared", "largest error", "limit", "")
    order = sorted(findings, key=lambda finding: (_kind(finding), finding.test))
    for (kind, test), group in groupby(order, key=lambda finding: (_kind(finding), finding.test)):
        some = list(group)
        worst = max(some, key=lambda finding: finding.error)
        state = "right" if all(finding.is_right for finding in some) else "WRONG"
        table.add(
            f"{len(some)} {kind}", test, str(sum(finding.count for finding in some)), f"{worst.error:.3g}",
            f"{worst.limit:g}", state,
        )  # fmt: skip
    lines = [f"{model} on {device} ({kernels} kernels)", table.plain().rstrip()]
    for finding in wrong[:MAX_SHOWN]:
        where = f" ({finding.detail})" if finding.detail else ""
        lines.append(f"WRONG: {finding.part}, {finding.test}: {finding.error:.3g}, limit {finding.limit:g}{where}")
    if len(wrong) > MAX_SHOWN:
        lines.append(f"and {len(wrong) - MAX_SHOWN} more")
    lines.append("a part is wrong: reinstall, and report it with this text" if wrong else "all parts are right")
    return "\n".join(lines) + "\n"


def _kind(finding: Finding) -> str:
    word = finding.part.split()[0]
    return {"op": "ops", "layer": "layers", "prompt": "prompts"}.get(word, word)
