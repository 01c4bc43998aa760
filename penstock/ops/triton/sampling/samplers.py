"""Launch the rarely used samplers around the cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.sampling.extras import Extras
from penstock.ops.sampling.row_params import MAX_CANDIDATES, RowParams
from penstock.ops.sampling.sample import VOCAB_TILE
from penstock.ops.triton.launch import pdl_options
from penstock.ops.triton.sampling.dry import apply_dry
from penstock.ops.triton.sampling.mirostat import set_mirostat_cut, update_samplers
from penstock.ops.triton.sampling.reshape import (
    apply_top_n_sigma,
    apply_xtc,
    find_xtc_tokens,
    measure_entropy,
    measure_moments,
    set_dynamic_temperature,
)
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import DRY_POSITIONS, MAX_RANKED, SAMPLING_BLOCK, SAMPLING_PARTS, SAMPLING_PIVOTS


@dataclass
class RareSamplers:
    """The tensors of one step that the kernels of rarely used samplers share."""

    logits: Tensor
    temperature: Tensor
    keys: Tensor
    positions: Tensor
    rows: Tensor
    row_params: RowParams
    extras: Extras
    edited: Tensor
    tops: Tensor
    sums: Tensor
    places: Tensor
    maxima: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    bounds: Tensor
    lasts: Tensor

    def __post_init__(self) -> None:
        self.num_rows, self.size = self.logits.shape
        self.num_tiles = self.tops.shape[1]
        self.grid, self.tiles = (self.num_rows, self.num_tiles), power_of_2(self.num_tiles)
        self.options = {"num_warps": 8, **pdl_options(self.logits)}

    def _floats(self, width: int) -> Tensor:
        return torch.empty((self.num_rows, self.num_tiles, width), device=self.logits.device)

    def before_cut(self) -> Tensor:
        """Launch DRY, top_n_sigma and mirostat's cut; return the temperatures to cut with."""
        row_params, extras, numbers = self.row_params, self.extras, self.extras.numbers
        width = extras.history.shape[1]
        moments = self._floats(4)
        apply_dry[(self.num_rows, cdiv(width, DRY_POSITIONS))](
            self.logits,
            self.edited,
            self.rows,
            self.positions,
            row_params.numbers,
            row_params.counts,
            row_params.words,
            row_params.biased,
            row_params.bias,
            numbers,
            extras.history,
            self.logits.stride(0),
            self.size,
            width,
            DRY_POSITIONS,
            **self.options,
        )
        measure_moments[self.grid](
            self.edited, self.rows, numbers, moments, self.size, self.num_tiles, VOCAB_TILE, **self.options
        )
        apply_top_n_sigma[self.grid](
            self.edited,
            self.temperature,
            self.rows,
            numbers,
            moments,
            self.tops,
            self.sums,
            self.places,
            self.maxima,
            extras.temperature,
            self.size,
            self.num_tiles,
            VOCAB_TILE,
            self.tiles,
            SAMPLING_PARTS,
            **self.options,
        )
        set_mirostat_cut[(self.num_rows,)](
            self.edited,
            self.rows,
            numbers,
            row_params.numbers,
            self.tops,
            self.sums,
            self.maxima,
            extras.temperature,
            self.candidates,
            self.candidate_ids,
            self.size,
            self.num_tiles,
            self.num_tiles * SAMPLING_PARTS,
            MAX_CANDIDATES,
            VOCAB_TILE,
            self.tiles,
            SAMPLING_PIVOTS,
            SAMPLING_BLOCK,
            MAX_RANKED,
            **self.options,
        )
        return extras.temperature

    def after_cut(self) -> Tensor:
        """Launch XTC and dynamic temperature; return the sums of each tile's weights at the final temperature."""
        extras, numbers = self.extras, self.extras.numbers
        found, tempered = self._floats(2), torch.empty((self.num_rows, self.num_tiles), device=self.logits.device)
        ids = torch.empty((self.num_rows, self.num_tiles), dtype=torch.int32, device=self.logits.device)
        for kernel in (find_xtc_tokens, apply_xtc):
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
                extras.temperature,
                found,
                ids,
                self.size,
                self.num_tiles,
                VOCAB_TILE,
                self.tiles,
                **self.options,
            )
        measure_entropy[self.grid](
            self.edited,
            self.temperature,
            self.rows,
            numbers,
            self.tops,
            self.bounds,
            self.lasts,
            found,
            self.size,
            self.num_tiles,
            VOCAB_TILE,
            self.tiles,
            **self.options,
        )
        set_dynamic_temperature[self.grid](
            self.edited,
            self.temperature,
            self.rows,
            numbers,
            self.tops,
            self.sums,
            self.bounds,
            self.lasts,
            found,
            extras.temperature,
            tempered,
            self.size,
            self.num_tiles,
            VOCAB_TILE,
            self.tiles,
            **self.options,
        )
        return tempered

    def update(self, sums: Tensor, tokens: Tensor) -> None:
        """Update the samplers' state with the tokens that were drawn."""
        extras, row_params = self.extras, self.row_params
        update_samplers[(self.num_rows,)](
            self.edited,
            self.rows,
            self.positions,
            extras.numbers,
            extras.history,
            extras.breakers,
            row_params.numbers,
            row_params.counts,
            self.tops,
            sums,
            extras.temperature,
            tokens,
            self.size,
            extras.history.shape[1],
            self.num_tiles,
            self.tiles,
            SAMPLING_BLOCK,
            **self.options,
        )
