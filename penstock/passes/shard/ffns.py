"""FFNs cut by their width, or experts dealt out whole."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

from penstock.models.cut import Cut
from penstock.models.experts import Experts
from penstock.models.layer import GatedMlp, Mlp
from penstock.passes.shard.links import GatherStackLink, LocalLink, ReduceExpertsLink, SumLink
from penstock.passes.shard.mixers import cut_last
from penstock.passes.shard.share import PANEL, CutPart, Indivisible, RankShare, scale, shift

WIDTH = "values within an FFN"


@singledispatch
def cut_ffn(ffn: Any, share: RankShare) -> CutPart:
    raise Indivisible(f"{type(ffn).__name__} layers, which have no way to be cut: number", 1)


@cut_ffn.register
def cut_mlp(ffn: Mlp, share: RankShare) -> CutPart:
    hidden, rows = share.divide(WIDTH, ffn.hidden), Cut((share.own(ffn.hidden),))
    last = cut_last("down", ffn.hidden, ffn.width, ffn.bias, share)
    cuts = {"up.weight": rows} | ({"up.bias": rows} if ffn.bias else {}) | dict(last.cuts)
    return CutPart(replace(ffn, hidden=hidden), cuts, last.links)


@cut_ffn.register
def cut_gated_mlp(ffn: GatedMlp, share: RankShare) -> CutPart:
    hidden, own = share.divide(WIDTH, ffn.hidden), share.own(ffn.hidden)
    rows = Cut((own, shift(own, ffn.hidden)))
    last = cut_last("down", ffn.hidden, ffn.width, ffn.bias, share)
    cuts = {"gate_up.weight": rows} | ({"gate_up.bias": rows} if ffn.bias else {}) | dict(last.cuts)
    return CutPart(replace(ffn, hidden=hidden), cuts, last.links)


@cut_ffn.register
def cut_experts(ffn: Experts, share: RankShare) -> CutPart:
    """The router is on every rank, a shared expert is cut as an MLP. By inputs, a layer's sum is reduced once."""
    piece = _deal_experts(ffn, share) if share.expert_parallel else _cut_each_expert(ffn, share)
    part, cuts, links = piece.part, dict(piece.cuts), dict(piece.links)
    if ffn.shared is not None:
        shared = cut_gated_mlp(ffn.shared, share)
        part = replace(part, shared=shared.part)
        cuts |= {f"shared.{name}": cut for name, cut in shared.cuts.items()}
        if share.by == "out":
            links |= {f"shared.{name}": link for name, link in shared.links.items()}
    if share.by == "in":
        links[""] = ReduceExpertsLink()
    return CutPart(part, cuts, links)


def _deal_experts(ffn: Experts, share: RankShare) -> CutPart:
    count, own, one = share.divide("experts", ffn.num_experts), share.own(ffn.num_experts), ffn.expert
    first, last = Cut((scale(own, 2 * one.hidden),)), Cut((scale(own, one.width),))
    cuts = {"experts.gate_up.weight": first, "experts.down.weight": last}
    if one.bias:
        cuts |= {"experts.gate_up.bias": first, "experts.down.bias": last}
    links = {"router": LocalLink(own.start, count)}
    if share.by == "out":
        return CutPart(replace(ffn, num_experts=count), cuts, links | {"down": SumLink()})
    return CutPart(replace(ffn, num_experts=count), cuts, dict(links))


def _cut_each_expert(ffn: Experts, share: RankShare) -> CutPart:
    one, numbers = ffn.expert, range(ffn.num_experts)
    hidden, own = share.divide("values within an expert", one.hidden, PANEL), share.own(one.hidden)
    halves = Cut(tuple(shift(own, half * one.hidden) for half in range(2 * ffn.num_experts)))
    cuts = {"experts.gate_up.weight": halves}
    part = replace(ffn, expert=replace(one, hidden=hidden))
    if share.by == "in":
        cuts["experts.down.weight"] = Cut(columns=own)
        if one.bias:
            cuts |= {"experts.gate_up.bias": halves, "experts.down.bias": Cut(is_zero=share.rank > 0)}
        return CutPart(part, cuts)
    if one.width // PANEL < share.size:
        raise Indivisible(f"outputs of an expert in panels of {PANEL}", one.width)
    rows = Cut(tuple(shift(share.spread_own(one.width), expert * one.width) for expert in numbers))
    cuts["experts.down.weight"] = rows
    if one.bias:
        cuts |= {"experts.gate_up.bias": halves, "experts.down.bias": rows}
    return CutPart(part, cuts, {"down": GatherStackLink(share.even(hidden), share.spread(one.width))})
