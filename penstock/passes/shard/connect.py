"""Put the exchanges of ranks into a plain model, block by block while it is loaded."""

from __future__ import annotations

from functools import reduce
from typing import Any

from penstock import layers
from penstock.models.cut import Cuts
from penstock.models.decoder import Decoder, Encoder, Finisher
from penstock.models.spec import parts_of
from penstock.parallel import Mesh


class Connect:
    """Finish blocks as `finish` does, after their parts are linked to those of the other ranks."""

    def __init__(self, cuts: Cuts, mesh: Mesh, finish: Finisher, first: int = 0) -> None:
        """`first`: the layer that the first block is."""
        if (mesh.rank, mesh.size) != (cuts.rank, cuts.size):
            raise ValueError(f"rank {cuts.rank} of {cuts.size} was given the mesh of rank {mesh.rank} of {mesh.size}")
        self.cuts, self.mesh, self.inner, self.ops = cuts, mesh, finish, finish.ops
        self._next = first

    def __call__(self, block: layers.AnyBlock, is_last: bool = False) -> layers.AnyBlock:
        index, self._next = self._next, self._next + 1
        for field, described in zip(("mixer", "ffn"), parts_of(self.cuts.whole.layers[index])):
            name = f"layers.{index}.{described.prefix}"
            for linked in [each for each in self.cuts.links if f"{each}.".startswith(f"{name}.")]:
                self._wrap(block, field, linked.removeprefix(name).lstrip("."), linked)
        return self.inner(block, is_last)

    def _wrap(self, block: Any, field: str, path: str, name: str) -> None:
        """Replace the part of a block's mixer or FFN at a path of attributes, or all of it."""
        *above, last = [field, *path.split(".")] if path else [field]
        owner = reduce(getattr, above, block)
        setattr(owner, last, self.cuts.links[name].wrap(getattr(owner, last), self.mesh, self.ops))

    def finish(self, model: Decoder | Encoder) -> None:
        """Link the vocabulary of the embedding and the head, where a pipeline stage has them."""
        embedding: Any = model.embedding
        tied = self._link_rows("embedding.tokens", embedding, "tokens") if hasattr(embedding, "tokens") else None
        head: Any = getattr(model, "head", None)
        if head is None:
            return
        if "head.rows" in self.cuts.links:
            self._link_rows("head.rows", head, "rows")
        elif tied is None:
            self._link_rows("embedding.tokens", head, "rows")
        else:
            head.rows = tied

    def _link_rows(self, name: str, owner: Any, field: str) -> Any:
        linked = self.cuts.links[name].wrap(getattr(owner, field), self.mesh, self.ops)
        setattr(owner, field, linked)
        return linked
