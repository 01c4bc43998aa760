"""The order in which samplers that few rows ask for are launched, around the cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.extras import Extras
from penstock.ops.sample import PIECE
from penstock.ops.triton.dry import apply_dry
from penstock.ops.triton.launch import early
from penstock.ops.triton.mirostat import aim, settle
from penstock.ops.triton.reshape import find_likely, keep_near, leave_out, measure, measure_surprise, set_heat
from penstock.ops.triton.search import PIVOTS
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.wishes import ROOM, Wishes

PARTS = 4  # of a piece, whose largest logits are told
BLOCK = 512  # values looked at together where few are
PLACES = 1024  # of a text, looked at by one program
RANKED = 128  # room for the likeliest tokens that mirostat 1 looks at


@dataclass
class Reshaping:
    """One step's rows: what was asked, and all that kernels tell each other."""

    logits: Tensor
    temperature: Tensor
    keys: Tensor
    positions: Tensor
    rows: Tensor
    wishes: Wishes
    extras: Extras
    edited: Tensor
    tops: Tensor
    sums: Tensor
    places: Tensor
    heads: Tensor
    near: Tensor
    near_ids: Tensor
    bounds: Tensor
    lasts: Tensor

    def __post_init__(self) -> None:
        self.num_rows, self.size = self.logits.shape
        self.num_pieces = self.tops.shape[1]
        self.grid, self.pieces = (self.num_rows, self.num_pieces), power_of_2(self.num_pieces)
        self.options = {"num_warps": 8, **early(self.logits)}

    def _floats(self, width: int) -> Tensor:
        return torch.empty((self.num_rows, self.num_pieces, width), device=self.logits.device)

    def before_cut(self) -> Tensor:
        """DRY, top_n_sigma and mirostat's aim. The temperatures to cut with."""
        wishes, extras, numbers = self.wishes, self.extras, self.extras.numbers
        width = extras.history.shape[1]
        moments = self._floats(4)
        apply_dry[(self.num_rows, cdiv(width, PLACES))](
            self.logits,
            self.edited,
            self.rows,
            self.positions,
            wishes.numbers,
            wishes.counts,
            wishes.words,
            wishes.biased,
            wishes.bias,
            numbers,
            extras.history,
            self.logits.stride(0),
            self.size,
            width,
            PLACES,
            **self.options,
        )
        measure[self.grid](self.edited, self.rows, numbers, moments, self.size, self.num_pieces, PIECE, **self.options)
        keep_near[self.grid](
            self.edited,
            self.temperature,
            self.rows,
            numbers,
            moments,
            self.tops,
            self.sums,
            self.places,
            self.heads,
            extras.heat,
            self.size,
            self.num_pieces,
            PIECE,
            self.pieces,
            PARTS,
            **self.options,
        )
        aim[(self.num_rows,)](
            self.edited,
            self.rows,
            numbers,
            wishes.numbers,
            self.tops,
            self.sums,
            self.heads,
            extras.heat,
            self.near,
            self.near_ids,
            self.size,
            self.num_pieces,
            self.num_pieces * PARTS,
            ROOM,
            PIECE,
            self.pieces,
            PIVOTS,
            BLOCK,
            RANKED,
            **self.options,
        )
        return extras.heat

    def after_cut(self) -> Tensor:
        """XTC and dynamic temperature. The sums of each piece's weights at the temperature to draw with."""
        extras, numbers = self.extras, self.extras.numbers
        found, tempered = self._floats(2), torch.empty((self.num_rows, self.num_pieces), device=self.logits.device)
        ids = torch.empty((self.num_rows, self.num_pieces), dtype=torch.int32, device=self.logits.device)
        for kernel in (find_likely, leave_out):
            kernel[self.grid](
                self.edited,
                self.keys,
                self.positions,
                self.rows,
                numbers,
                self.tops,
                self.sums,
                self.bounds,
                self.lasts,
                extras.heat,
                found,
                ids,
                self.size,
                self.num_pieces,
                PIECE,
                self.pieces,
                **self.options,
            )
        measure_surprise[self.grid](
            self.edited,
            self.temperature,
            self.rows,
            numbers,
            self.tops,
            self.bounds,
            self.lasts,
            found,
            self.size,
            self.num_pieces,
            PIECE,
            self.pieces,
            **self.options,
        )
        set_heat[self.grid](
            self.edited,
            self.temperature,
            self.rows,
            numbers,
            self.tops,
            self.sums,
            self.bounds,
            self.lasts,
            found,
            extras.heat,
            tempered,
            self.size,
            self.num_pieces,
            PIECE,
            self.pieces,
            **self.options,
        )
        return tempered

    def settle(self, sums: Tensor, tokens: Tensor) -> None:
        """Take in the tokens that were drawn."""
        extras, wishes = self.extras, self.wishes
        settle[(self.num_rows,)](
            self.edited,
            self.rows,
            self.positions,
            extras.numbers,
            extras.history,
            extras.breakers,
            wishes.numbers,
            wishes.counts,
            self.tops,
            sums,
            extras.heat,
            tokens,
            self.size,
            extras.history.shape[1],
            self.num_pieces,
            self.pieces,
            BLOCK,
            **self.options,
        )
