"""The ledger of a request: entries of the engine, of the request itself and of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.types import Applied, DraftCount, Request

DRAFTS = "drafts"  # kind of an entry per drafter


def list_applied(
    static: Sequence[Applied], request: Request, drafts: Iterable[DraftCount], forced: Sequence[int]
) -> tuple[Applied, ...]:
    """List the entries of a request. `static` are the engine's; `forced` the answers that were closed by force."""
    return (*static, *_list_of_request(request), *_list_of_answers(drafts, forced))


def _list_of_request(request: Request) -> list[Applied]:
    sampling, found = request.sampling, []
    if request.loras:
        found.append(Applied("lora", [{"name": one.name, "scale": one.scale} for one in request.loras]))
    if request.num_dropped_messages or request.num_truncated_tokens:
        dropped = {"tokens": request.num_truncated_tokens, "messages": request.num_dropped_messages}
        found.append(Applied("truncation", dropped))
    if request.grammar is not None and request.grammar.relaxed:
        found.append(Applied("relaxed_schema", list(request.grammar.relaxed)))
    if sampling.logits_processors:
        found.append(Applied("logits_processors", len(sampling.logits_processors), exact=False))
    if sampling.seed is None and not sampling.greedy and not request.beam and not request.pool:
        signed = request.seed - (1 << 64) if request.seed >= 1 << 63 else request.seed  # as a request may send it
        found.append(Applied("seed", signed, exact=False))
    return found


def _list_of_answers(drafts: Iterable[DraftCount], forced: Sequence[int]) -> list[Applied]:
    found = [
        Applied(DRAFTS, {"drafter": one.drafter, "verified": one.num_verified, "accepted": one.num_accepted})
        for one in drafts
    ]
    return [*found, Applied("forced_closing", list(forced))] if forced else found


def format_ledger(applied: Iterable[Applied]) -> dict[str, Any]:
    """Format for a response. Equal entries of several prompts are listed once, and their drafts are added up."""
    entries: dict[bytes, dict[str, Any]] = {}
    drafts, is_exact = DraftCounts(), True
    for one in applied:
        is_exact &= one.exact
        if one.kind == DRAFTS:
            drafts.add([DraftCount(one.value["drafter"], one.value["verified"], one.value["accepted"])])
            continue
        entry = {"kind": one.kind, "value": one.value, **({} if one.exact else {"exact": False})}
        entries.setdefault(msgspec.json.encode(entry), entry)
    told = [{"kind": one.kind, "value": one.value} for one in _list_of_answers(drafts.list_all(), ())]
    return {"exact": is_exact, "applied": [*entries.values(), *told]}


class DraftCounts:
    """Adds up what became of each drafter's tokens."""

    def __init__(self) -> None:
        self._counts: dict[str, DraftCount] = {}

    def add(self, counts: Iterable[DraftCount]) -> None:
        for drafter, verified, accepted in counts:
            before = self.of(drafter)
            self._counts[drafter] = DraftCount(drafter, before.num_verified + verified, before.num_accepted + accepted)

    def of(self, drafter: str) -> DraftCount:
        return self._counts.get(drafter) or DraftCount(drafter, 0, 0)

    def list_all(self) -> list[DraftCount]:
        return [self._counts[drafter] for drafter in sorted(self._counts)]
