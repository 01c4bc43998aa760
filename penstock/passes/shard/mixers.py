"""Mixers cut by heads."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

from penstock.models.cut import Cut, Link
from penstock.models.latent import LatentAttentionSpec
from penstock.models.layer import Attention, EncoderAttention, Norm, SinkAttention
from penstock.models.recurrent import Mamba2
from penstock.passes.shard.links import GatherLink, ReduceLink, SpanningLink
from penstock.passes.shard.share import CutPart, Indivisible, RankShare, scale, shift

HEADS, KV_HEADS = "attention heads", "key/value heads"


@singledispatch
def cut_mixer(mixer: Any, share: RankShare) -> CutPart:
    raise Indivisible(f"{type(mixer).__name__} layers, which have no way to be cut: number", 1)


def cut_last(name: str, num_in: int, num_out: int, bias: bool, share: RankShare) -> CutPart:
    """Cut the product that ends a mixer or FFN; its inputs are spread evenly over the ranks already."""
    inputs = share.even(num_in // share.size)
    if share.by == "in":
        cuts = {f"{name}.weight": Cut(columns=share.own(num_in))}
        if bias:
            cuts[f"{name}.bias"] = Cut(is_zero=share.rank > 0)
        return CutPart(None, cuts, {name: ReduceLink()})
    rows = Cut((share.spread_own(num_out),))
    cuts = {f"{name}.weight": rows} | ({f"{name}.bias": rows} if bias else {})
    return CutPart(None, cuts, {name: GatherLink(inputs, share.spread(num_out))})


def divide_kv_heads(count: int, share: RankShare) -> range:
    """Return a rank's key/value heads: its share, or where there are fewer than ranks the one that its queries read."""
    if count % share.size == 0:
        return share.own(count)
    if share.size % count:
        raise Indivisible(KV_HEADS, count)
    first = share.rank * count // share.size
    return range(first, first + 1)


@cut_mixer.register
def cut_attention(mixer: Attention, share: RankShare) -> CutPart:
    size, num_heads = mixer.head_size, share.divide(HEADS, mixer.num_heads)
    heads, kv_heads = share.own(mixer.num_heads), divide_kv_heads(mixer.num_kv_heads, share)
    q, k, _ = mixer.rows
    keys = shift(scale(kv_heads, size), q)
    rows = Cut((scale(heads, size), keys, shift(keys, k)))
    last = cut_last("out", q, mixer.width, mixer.out_bias, share)
    cuts = {"qkv.weight": rows} | ({"qkv.bias": rows} if mixer.qkv_bias else {}) | dict(last.cuts)
    if isinstance(mixer, SinkAttention):
        cuts["sinks.weight"] = Cut((heads,))
    links = dict(last.links)
    links |= _link_norm("q_norm", mixer.q_norm, mixer.num_heads, heads, size, share)
    links |= _link_norm("k_norm", mixer.k_norm, mixer.num_kv_heads, kv_heads, size, share)
    alibi = mixer.alibi[heads.start : heads.stop]
    part = replace(mixer, num_heads=num_heads, num_kv_heads=len(kv_heads), alibi=alibi)
    return CutPart(part, cuts, links)


def _link_norm(name: str, norm: Norm | None, count: int, own: range, size: int, share: RankShare) -> dict[str, Link]:
    """Link a norm over all heads; one over each head needs nothing."""
    if norm is None or norm.size == size:
        return {}
    if norm.size != count * size:
        raise Indivisible(f"heads in groups of {norm.size // size} that are normed together", count)
    repeats = len(own) * share.size // count  # times that each head is on a rank
    order = None
    if repeats > 1:
        order = tuple(repeats * head * size + column for head in range(count) for column in range(size))
    return {name: SpanningLink(share.even(len(own) * size), own.start * size, order)}


@cut_mixer.register
def cut_encoder_attention(mixer: EncoderAttention, share: RankShare) -> CutPart:
    num_heads = share.divide(HEADS, mixer.num_heads)
    whole, own = mixer.num_heads * mixer.head_size, scale(share.own(mixer.num_heads), mixer.head_size)
    rows = Cut((own, shift(own, whole), shift(own, 2 * whole)))
    last = cut_last("out", whole, mixer.width, mixer.bias, share)
    cuts = {"qkv.weight": rows} | ({"qkv.bias": rows} if mixer.bias else {}) | dict(last.cuts)
    return CutPart(replace(mixer, num_heads=num_heads), cuts, last.links)


@cut_mixer.register
def cut_latent_attention(mixer: LatentAttentionSpec, share: RankShare) -> CutPart:
    """Cut the heads; the latents, and what makes them, are on every rank."""
    num_heads, heads = share.divide(HEADS, mixer.num_heads), share.own(mixer.num_heads)
    last = cut_last("out", mixer.num_heads * mixer.value_size, mixer.width, mixer.bias, share)
    cuts = {
        "q_b.weight" if mixer.query_rank else "q.weight": Cut((scale(heads, mixer.head_size),)),
        "kv_b.weight": Cut((scale(heads, mixer.nope_size + mixer.value_size),)),
    }
    return CutPart(replace(mixer, num_heads=num_heads), cuts | dict(last.cuts), last.links)


@cut_mixer.register
def cut_mamba2(mixer: Mamba2, share: RankShare) -> CutPart:
    """Cut the heads, and with them the groups that share b and c, which are repeated where there are fewer."""
    num_heads, heads = share.divide("Mamba-2 heads", mixer.num_heads), share.own(mixer.num_heads)
    count, state = mixer.num_groups, mixer.state_size
    if count % share.size and share.size % count:
        raise Indivisible("groups of Mamba-2 heads", count)
    first = share.rank * count // share.size
    groups = range(first, first + max(1, count // share.size))
    inner, own, shared = mixer.inner, scale(heads, mixer.head_size), scale(groups, state)
    channels = own, shift(shared, inner), shift(shared, inner + count * state)
    steps = shift(heads, 2 * inner + 2 * count * state)
    rows = Cut((own, *(shift(run, inner) for run in channels), steps))
    last = cut_last("out", inner, mixer.width, mixer.bias, share)
    cuts = {"in.weight": rows} | ({"in.bias": rows} if mixer.bias else {}) | dict(last.cuts)
    cuts["conv.weight"] = Cut(channels)
    if mixer.conv_bias:
        cuts["conv.bias"] = Cut(channels)
    cuts |= {f"{name}.weight": Cut((heads,)) for name in ("a_log", "d", "dt_bias")}
    links = dict(last.links)
    if count % share.size:
        links["norm"] = SpanningLink(share.even(len(own)), own.start)
        normed = count
    else:
        cuts["norm.weight"] = Cut((own,))
        normed = len(groups)
    return CutPart(replace(mixer, num_heads=num_heads, num_groups=len(groups), norm_groups=normed), cuts, links)
