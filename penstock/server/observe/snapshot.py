"""Describe a model, and requests that ended, for `/admin/live`."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.messages import Seen
    from penstock.server.engines.engine import RemoteEngine
    from penstock.server.engines.fleet import Fleet
    from penstock.server.engines.in_flight import InFlightRequest
    from penstock.server.model import ServedModel
    from penstock.server.observe.trace import Trace

MAX_ROWS = 512


def describe_absent(model: ServedModel) -> dict[str, Any]:
    """Describe a model that is not loaded."""
    shown: dict[str, Any] = {"name": model.name, "state": "unloaded", "restarts": 0, "age_s": None, "num_rows": 0}
    return {**shown, "rows": [], "queue": [], "blocks": None}


def describe_model(model: ServedModel, engine: Fleet) -> dict[str, Any]:
    """Describe a model with its rows, its queue and its blocks, as its engines were last looked at."""
    seen = [one for _, one in engine.view.list_seen()]
    rows = _list_rows(engine, seen)
    return {
        "name": model.name,
        "state": f"failed: {engine.failure}" if engine.failure else engine.state,
        "restarts": engine.num_restarts,
        "age_s": round(time.monotonic() - engine.view.seen_s, 3) if seen else None,
        "num_rows": len(rows),
        "rows": rows[:MAX_ROWS],
        "queue": _list_queue(engine, seen),
        "blocks": _format_blocks(seen) if seen else None,
        **describe_processes(engine),
    }


def describe_processes(engine: Fleet) -> dict[str, Any]:
    """Describe a model's replicas, if there are several; else the ranks of its one engine, if those are."""
    if len(engine.engines) > 1:
        return {"replicas": [describe_replica(one) for one in engine.engines]}
    return engine.engines[0].ranks.describe()


def describe_replica(engine: RemoteEngine) -> dict[str, Any]:
    """Describe one of a model's engines."""
    replica, stats = engine.replica, engine.stats
    return {
        "replica": replica.number,
        "role": replica.role,
        "pid": engine.pid,
        "state": engine.state,
        "restarts": engine.num_restarts,
        "rows": replica.num_rows,
        "pending_prompt_tokens": replica.num_pending,
        "used_blocks": int(stats.get("num_used_blocks", 0)),
        "blocks": int(stats.get("num_blocks", 0)),
        "prompt_tokens": int(engine.total("num_prompt_tokens")),
        "cached_tokens": int(engine.total("num_cached_tokens")),
        "output_tokens": int(engine.total("num_output_tokens")),
        **engine.ranks.describe(),
    }


def summarize_trace(trace: Trace) -> dict[str, Any]:
    """Summarize a request that ended; `/admin/requests/{id}` has the rest."""
    return {
        "id": trace.answer_id or trace.id,
        "model": trace.model,
        "tenant": trace.tenant,
        "status": trace.status,
        "finish_reasons": list(dict.fromkeys(trace.finish_reasons)),
        "begun": round(trace.begun_unix_s, 3),
        "e2e_s": round(trace.e2e_s, 3),
        "ttft_s": None if trace.first_s is None else round(trace.first_s - trace.begun_s, 3),
        "prompt_tokens": trace.num_prompt,
        "cached_tokens": trace.num_cached,
        "output_tokens": trace.num_output,
        "preemptions": trace.num_preemptions,
        "restarts": trace.num_restarts,
        **({"replicas": trace.replicas} if trace.replicas else {}),
    }


def _list_rows(engine: Fleet, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """List answers, those in the engine first."""
    dispatcher, rows = engine.dispatcher, []
    told: set[tuple[str, int]] = set()
    now = time.monotonic()
    for row in (row for one in seen for row in one.rows):
        part = dispatcher.parts.get(row.request_id)
        if part is None or row.sibling not in part.siblings:
            continue  # it has ended
        told.add((part.flight.request.id, row.sibling))
        more = {"state": row.state, "computed_tokens": row.computed, "cached_tokens": row.cached}
        if len(engine.engines) > 1:
            more["replica"] = part.engine.number
        rows.append(_format_row(part.flight, row.sibling, now, {**more, "preemptions": row.preemptions}))
    for flights in (dispatcher.flights.values(), engine.admission):
        for flight in flights:
            for sibling, tokens in flight.outputs.items():
                if len(rows) >= MAX_ROWS:
                    return rows
                if (flight.request.id, sibling) not in told:
                    told.add((flight.request.id, sibling))
                    state = _name_state(flight.trace.find_state((flight.number, sibling)), bool(tokens))
                    more = {"state": state, "computed_tokens": 0, "cached_tokens": flight.num_cached}
                    rows.append(
                        _format_row(flight, sibling, now, {**more, "preemptions": flight.trace.num_preemptions})
                    )
    return rows


def _name_state(state: str | None, has_begun: bool) -> str:
    """Name the state of an answer that the engine did not tell of."""
    if state in ("grammar", "restart"):
        return state
    return "preempted" if has_begun else "queued"


def _is_new(flight: InFlightRequest) -> bool:
    """Tell if a request that the engine has not told of yet waits for its turn, as all its answers do."""
    return not any(flight.outputs.values()) and all(
        _name_state(flight.trace.find_state((flight.number, sibling)), False) == "queued" for sibling in flight.outputs
    )


def _list_queue(engine: Fleet, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """List tenants by what of theirs has not begun: in the admission queue, or in the engine without a row."""
    waiting = {tenant.name: [tenant.num_flights, tenant.num_tokens] for tenant in engine.admission.tenants.values()}
    has_row: dict[str, bool] = {}  # request of the engine's last look → none of its rows is queued
    for row in (row for one in seen for row in one.rows):
        part = engine.dispatcher.parts.get(row.request_id)
        if part is not None:
            id = part.flight.request.id
            has_row[id] = has_row.get(id, True) and row.state != "queued"
    admission = set(engine.admission)
    for flight in engine.dispatcher.flights.values():
        if flight not in admission and not has_row.get(flight.request.id, not _is_new(flight)):
            counts = waiting.setdefault(flight.tenant, [0, 0])
            counts[0] += 1
            counts[1] += len(flight.request.tokens)
    return [{"tenant": name, "requests": num, "tokens": tokens} for name, (num, tokens) in waiting.items()]


def _format_row(flight: InFlightRequest, sibling: int, now_s: float, more: Mapping[str, Any]) -> dict[str, Any]:
    trace, request = flight.trace, flight.request
    return {
        "id": trace.answer_id or trace.id or request.id,
        "index": sibling,
        "tenant": flight.tenant,
        "state": more["state"],
        "prompt_tokens": len(request.tokens),
        "computed_tokens": more["computed_tokens"],
        "cached_tokens": more["cached_tokens"],
        "output_tokens": len(flight.outputs.get(sibling, ())),
        "max_tokens": request.max_tokens,
        "draft_tokens": trace.num_drafts,
        "accepted_tokens": trace.num_accepted,
        "preemptions": more["preemptions"],
        "age_s": round(now_s - flight.begun_s, 3),
        **({"replica": more["replica"]} if "replica" in more else {}),
    }


def _format_blocks(seen: Sequence[Seen]) -> dict[str, Any]:
    """Add up the pools of all engines; their maps follow each other."""
    pools = [one.blocks for one in seen]
    return {
        "num": sum(one.num for one in pools),
        "block_size": pools[0].block_size,
        "free": sum(one.free for one in pools),
        "held": sum(one.held for one in pools),
        "cached": sum(one.cached for one in pools),
        "shared": sum(one.shared for one in pools),
        "evicted": sum(one.evicted for one in pools),
        "map": base64.b64encode(b"".join(one.cells for one in pools)).decode(),
        "blocks_per_cell": max(one.blocks_per_cell for one in pools),
    }
