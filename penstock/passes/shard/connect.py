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

    def __init__(self, cuts: Cuts, mesh: Mesh, finish: Finisher) -> None:
        if (mesh.rank, mesh.size) != (cuts.rank, cuts.size):
            raise ValueError(f"rank {cuts.rank} of {cuts.size} was given the mesh of rank {mesh.rank} of {mesh.size}")
        self.cuts, self.mesh, self.inner, self.ops = cuts, mesh, finish, finish.ops
        self._num_blocks = 0

    def __call__(self, block: layers.AnyBlock, is_last: bool = False) -> layers.AnyBlock:
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
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
        """Link the vocabulary of the embedding and the head."""
        embedding = model.embedding
        tokens = embedding.tokens
        embedding.tokens = self.cuts.links["embedding.tokens"].wrap(tokens, self.mesh, self.ops)
        if isinstance(model, Decoder):
            link = self.cuts.links.get("head.rows")
            model.head.rows = embedding.tokens if link is None else link.wrap(model.head.rows, self.mesh, self.ops)
