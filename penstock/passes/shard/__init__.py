"""Cut a model into the parts of several ranks: tensor parallel, and expert parallel.

`shard` makes one rank's spec of a whole one, before anything is loaded; `Connect` puts the exchanges into each block
once its weights are there, before it is lowered. Layers stay as they are: they are called with what their rank has.

By outputs, ranks gather what they computed, no sum is split, and a CPU gives the bits of one rank. By inputs, each adds
its part of a sum: half the messages, in another order of sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.errors import InvalidConfig
from penstock.models.cut import Cut, Cuts, Link
from penstock.models.spec import ModelSpec, parts_of
from penstock.passes.shard.connect import Connect
from penstock.passes.shard.ffns import cut_ffn
from penstock.passes.shard.links import VocabularyLink
from penstock.passes.shard.mixers import cut_mixer
from penstock.passes.shard.share import By, CutPart, Indivisible, RankShare

__all__ = ["By", "Connect", "find_sizes", "shard"]

MAX_SIZE = 64
EMBEDDING, HEAD = "embedding.tokens", "head.rows"


def shard(spec: ModelSpec, rank: int, size: int, by: By, expert_parallel: bool = False) -> tuple[ModelSpec, Cuts]:
    """Return the spec of one rank, whose `cuts` are returned beside it. `expert_parallel` deals experts out to ranks
    instead of cutting each of them."""
    try:
        return _shard(spec, RankShare(rank, size, by, expert_parallel))
    except Indivisible as error:
        sizes = ", ".join(map(str, find_sizes(spec, by, expert_parallel)))
        raise InvalidConfig(
            f"tensor_parallel_size={size} does not divide the model's {error}: use one of the sizes {sizes}"
        ) from None


def find_sizes(spec: ModelSpec, by: By, expert_parallel: bool = False) -> list[int]:
    """List the numbers of ranks that a model can be cut into."""
    return [size for size in range(1, MAX_SIZE + 1) if _can_shard(spec, RankShare(0, size, by, expert_parallel))]


def _can_shard(spec: ModelSpec, share: RankShare) -> bool:
    try:
        _shard(spec, share)
    except Indivisible:
        return False
    return True


def _shard(spec: ModelSpec, share: RankShare) -> tuple[ModelSpec, Cuts]:
    cuts: dict[str, Cut] = {}
    links: dict[str, Link] = {}
    known: dict[Any, CutPart] = {}  # layers are often alike
    described: list[Any] = []
    for index, layer in enumerate(spec.layers):
        changed = {}
        for field, part in zip(("mixer", "ffn"), parts_of(layer)):
            if part not in known:
                known[part] = (cut_mixer if field == "mixer" else cut_ffn)(part, share)
            piece, name = known[part], f"layers.{index}.{part.prefix}"
            changed[field] = piece.part
            cuts |= {f"{name}.{inner}": cut for inner, cut in piece.cuts.items()}
            links |= {f"{name}.{inner}".rstrip("."): link for inner, link in piece.links.items()}
        described.append(replace(layer, **changed))  # type: ignore[type-var]
    vocabulary = spec.vocab_size
    if vocabulary < share.size:
        raise Indivisible("tokens of the vocabulary", vocabulary)
    for name in (EMBEDDING, *((HEAD,) if spec.head is not None and not spec.head.tied else ())):
        cuts[f"{name}.weight"] = Cut((share.spread_own(vocabulary),))
        links[name] = VocabularyLink(share.spread(vocabulary))
    made = replace(spec, layers=tuple(described))
    stacks = {f"{name}.weight": merge.num_matrices for name, merge in made.merges().items() if merge.num_matrices > 1}
    all_cuts = Cuts(spec, share.rank, share.size, cuts, stacks, links)
    return replace(made, cuts=all_cuts), all_cuts
