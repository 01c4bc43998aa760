"""Every measured threshold and launch shape of the GPU kernels and of the steps that launch them.

Measured on one H200, on replayed CUDA graphs of whole steps, with Llama-3.1-8B and Qwen3-0.6B shapes; each section
gives the date and the shapes. docs/decisions/0017 and 0018 give the figures. It imports no Triton, so that models and
passes may ask it on any machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Elementwise, norms, pooling: 2026-11-15; WIDE_*: 2026-11-16, gates of 32 rows, 14336 wide.
ELEMENTWISE_BLOCK = 1024  # values per program
WIDE_ELEMENTWISE_BLOCK = 2048  # for gated rows of at least WIDE_ROW values
WIDE_ROW = 8192
MAX_NORM_WIDTH = 1 << 16  # values of a row that one program norms
MAX_NORM_BLOCK = 4096  # values read at once for the factor of a deferred norm
MAX_POOLING_VALUES = 1 << 14  # per program at once

# GEMV and skinny GEMM: 2026-11-15, 1 to 32 rows, 1024 to 14336 inputs.
MAX_GATED_GEMV_WIDTH = 1024  # inputs; beyond, gate and up as one GEMV and an activation kernel are faster
MAX_SKINNY_ROWS = 32  # rows of the skinny GEMM; beyond, cuBLAS is faster
SKINNY_OUTPUTS = range(4096, 8192)  # outputs of its weights; with fewer or more cuBLAS is faster
SKINNY_TILE_OUTPUTS, SKINNY_TILE_INPUTS = 64, 128
MAX_DEFERRED_NORM_VALUES = 1 << 18  # of x; beyond, reading it again takes as long as norming it first

# cuBLASLt's 176 × 128 tile: 2026-11-16, 8192 and 16384 rows × 6144 to 28672 outputs × 4096 inputs.
MIN_CHOSEN_ROWS = 4096  # rows from which the tile is asked for
CHOSEN_ROWS_STEP = 1024  # row counts are rounded up to a multiple of it before asking
MIN_CHOSEN_MACS = 1 << 36  # multiply-adds; less work gains less than the host spends asking

# Epilogue kernels of FP8, integer and deterministic products: 2026-11-15.
EPILOGUE_BLOCK = 1024  # outputs per program

# INT8 and INT4 weights: 2026-11-16, 1 to 256 rows, the 8B's and the 0.6B's matrices (decision 0018).
INT_TILE_ROWS = (16, 32, 64, 128)  # rows of a tensor-core tile
MAX_INT_TILE_ROWS = 128  # beyond, dequantize and call cuBLAS; half as many for weights under MIN_LARGE_WEIGHT
MIN_LARGE_WEIGHT = 1 << 24  # values; smaller weights make too few 256-wide tiles
MIN_WIDE_TILE_OUTPUTS = 4096  # outputs; fewer make too few 128-wide tiles
INT_STAGES = 3  # weight tiles in flight
MAX_INT_GEMV_VALUES = 1 << 24  # of a weight; beyond, one row is multiplied by integer dot products: 2026-11-19
MIN_MANY_DOT_OUTPUTS = 8192
DOT_GROUPS = 16  # groups of 32 inputs that a program quantizes: 2026-11-19
DEQUANTIZE_SPANS = 128  # spans per program
DEQUANTIZE_SCRATCH_BYTES = 128 << 20  # of weights dequantized at a time

# FP8 weights with a scale for each group of inputs: estimated 2026-11-19, not measured yet.
MAX_GEMV_GROUP = 1024  # inputs; a program of one row reads whole groups
WIDEN_BLOCK = 1024  # inputs per program
FP8_GROUP_STAGES = 3  # weight tiles in flight
MAX_FP8_TILE_ROWS = 512  # beyond, widening once and cuBLAS take less than widening for every 128 rows
MAX_WIDE_BLOCK_ROWS = 32  # of a tile that reads 128 inputs at a time; more leave no shared memory for it

# Deterministic GEMM: 2026-11-18, 1 to 256 rows, the 8B's and the 0.6B's matrices.
EXACT_TILE_ROWS = (16, 32, 64, 128)
MAX_EXACT_TRITON_ROWS = 32  # of 16-bit weights on Hopper; beyond, cuBLAS without split-K is as fast as it ever is
MIN_EXACT_TILES = 32  # of 64 outputs, of a few 16-bit rows; fewer leave most SMs idle
EXACT_GROUP_TILES = 8  # output tiles that share rows in L2
EXACT_ROWS_STEP, EXACT_ROWS_STEPS = 16, 64  # cuBLAS's algorithm is asked for by rows rounded up to a step
CHECKED_ROWS = 256  # random rows that an algorithm is checked with

# Experts: estimated; 1 and 32 rows of Qwen3-30B-A3B and DeepSeek-V2-Lite ran near their limits 2026-11-19.
SORT_BLOCKS = (256, 1024, 4096)  # pairs of a row and a matrix that are counted at a time
MAX_GROUPED_GEMV_PAIRS = 64  # with a program for each; beyond, rows of one matrix are multiplied together
MAX_READ_AGAIN = 1.25  # times the matrices that rows choose by chance may be read for want of sharing
GROUPED_TILE_ROWS = (16, 32, 64, 128)

# Adapters: 2026-11-19, 8B, rank 16 on all linears.
LORA_TILE_OUTPUTS = 64
MAX_LORA_SPLITS = 16  # of the inputs, side by side for a few rows: else they would occupy a few SMs
MAX_FEW_LORA_ROWS, LORA_TILE_ROWS = 256, (16, 64)  # rows of a step up to which tiles have few rows

# Attention: 2026-11-15 (decode) and 2026-11-16 (prefill, shared prefixes), contexts of 64 to 2304 tokens.
ATTENTION_TILE_ROWS = 128  # prefill queries times query heads per KV head
MIN_WIDE_READ_ROWS, MAX_WIDE_READ_ROWS = 16, 48  # decode batches that read 128 keys at a time
MAX_FULL_TILE_HEAD_SIZE = 128  # larger heads read fewer keys at a time
MAX_TILE_REGISTERS = 128  # per thread, so that two tiles share an SM
MAX_SHORT_PROMPT = 256  # positions of the longest; up to it _prefill beats the Hopper kernel: 2026-11-17, 64 × 128
MIN_HOPPER_TOKENS = 512  # of a captured step, whose lengths the host does not know: 2026-11-17, 64 × 512 tokens on
HOPPER_GROUPS = (4,)  # query heads per KV head, and dtypes, for which the Hopper kernel has been checked: 2026-11-17
HOPPER_DTYPES = (torch.bfloat16,)
MAX_FUSED_QKV_ROWS = 32  # decode rows of the fused norm, rope, cache write and attention; slower from 64 on
MAX_FUSED_QKV_VALUES = 8192  # of its queries and key in a program; more exceed Ada's shared memory
MAX_HEADS_PER_PROGRAM = 8  # of qkv_write
QKV_WRITE_WARPS = 2

# Deterministic attention: 2026-11-15, contexts of 256 to 4096 tokens.
MIN_EXACT_ATTENTION_ROWS = 64  # tile rows: queries times query heads per KV head
MIN_EXACT_SINGLE_ROWS = 16  # of a tile with one query, on Hopper
EXACT_SPLIT_POSITIONS = 256
MIN_EXACT_ATTENTION_PROGRAMS = 264  # with fewer, KV splits run side by side
MAX_EXACT_SPLIT_BYTES = 1 << 28  # of their partial results

# Attention over latents: estimated 2026-11-19, not measured yet; decision 0050.
# Queries times heads, where a program may use much shared memory and where not; sums of 512 values of each of 64 take
# half of an SM's registers.
LATENT_TILE_ROWS, SMALL_LATENT_TILE_ROWS = 64, 32

# Sampling: 2026-11-15, vocabularies of 128256 and 151936.
SAMPLING_BLOCK = 512  # values of a candidate list read at once
SAMPLING_PARTS = 4  # maxima kept per tile of the vocabulary
SAMPLING_PIVOTS = 16  # of the threshold search
DRY_POSITIONS = 1024  # context positions per program
MAX_RANKED = 128  # room for the tokens that mirostat 1 ranks

# Steps of the runner: decode splits 2026-11-15 (18 sequences of 1557 tokens, 32 of 256), shared prefixes 2026-11-16
# (256 sequences, 2048 shared positions).
SHORT_CONTEXT = 512  # positions of the longest sequence
MAX_KV_SPLITS, MAX_SHORT_KV_SPLITS, MAX_PREFIX_SPLITS = 32, 8, 16
CAPTURE_AFTER = 8  # steps of a bucket that a larger captured one could stand in for
CAPTURED_TOKENS = 2048, 8192  # of a mixed step, at least and at most
CAPTURED_WORK = 1.6e13  # tokens times parameters; more takes the device longer than the host takes to launch it
MIXED_SEQUENCES = (8, 64)  # for which mixed steps are captured, and the most there can be
MIN_PREFIX_SEQUENCES, MIN_PREFIX_POSITIONS = 4, 256  # of a shared prefix that is read once
MAX_PREFIXES = 8  # shared in a step


def max_captured_tokens(num_parameters: int) -> int:
    """Return the tokens of the largest mixed step that is captured. 2026-11-17, 8B."""
    least, most = CAPTURED_TOKENS
    return min(most, max(least, int(CAPTURED_WORK / num_parameters)))


def gemv_shape(width: int, itemsize: int) -> tuple[int, int, int]:
    """Return outputs, inputs and warps of a GEMV program. 2026-11-15, 1024 to 14336 inputs."""
    block = 1 << max(0, width - 1).bit_length()
    if block > 4096:
        return (2, 1024, 4) if itemsize == 1 else (1, 1024, 4) if itemsize == 4 else (2, 2048, 4)
    if itemsize == 1:
        return 4, block, max(1, min(4, block // 1024))
    if itemsize == 4:
        return 1, block, max(1, min(16, block // 512))
    if block < 4096:
        return 4, block, 4 if block <= 1024 else 16
    return 2, block, 8


def grouped_gemv_shape(width: int, itemsize: int, is_gated: bool) -> tuple[int, int, int]:
    """Return outputs, inputs and warps of a program that multiplies one row with a part of its expert. 2026-11-19, 768
    and 2048 inputs."""
    if is_gated and itemsize == 2:
        return 1, min(1024, 1 << max(0, width - 1).bit_length()), 4
    num_outs, block, num_warps = gemv_shape(width, itemsize)
    return max(1, num_outs // 2) if is_gated else num_outs, block, num_warps


class GemmTile(NamedTuple):
    """The shape of a program whose sums are chains (`sum_chain`)."""

    num_outs: int
    num_rows: int
    num_inputs: int  # at a time
    num_warps: int
    num_stages: int

    def sizes(self, width: int) -> tuple[int, int, int, bool, int]:
        """Return the kernel arguments OUTS, ROWS, BLOCK, EVEN and STAGES for so many inputs."""
        return self.num_outs, self.num_rows, self.num_inputs, width % self.num_inputs == 0, self.num_stages


def exact_tile(num_rows: int, num_out: int, itemsize: int, has_large_smem: bool) -> GemmTile:
    """Return the tile for so many rows and outputs. An FP8 sum's order depends on `num_inputs`, which is fixed.
    2026-11-18."""
    largest = EXACT_TILE_ROWS[-1]
    rows = next((size for size in EXACT_TILE_ROWS if size >= num_rows), largest)
    if itemsize == 4:  # no tensor-core instruction
        return GemmTile(64, min(rows, 32), 32, 4, 2)
    if rows == largest:
        return GemmTile(128, rows, 128 // itemsize, 8, 3)
    if itemsize == 1 or rows > MAX_EXACT_TRITON_ROWS:
        return GemmTile(64, rows, 128 // itemsize, 4, 5)
    if rows == EXACT_TILE_ROWS[0] and num_out < MIN_EXACT_TILES * 64:
        return GemmTile(16, rows, 512, 2, 3)
    return GemmTile(64, rows, 128, 4, 3 if not has_large_smem else 6 if rows == EXACT_TILE_ROWS[0] else 5)


def uses_grouped_gemv(num_tokens: int, num_chosen: int, num_matrices: int) -> bool:
    """Return True if so few rows share a matrix that each reads its own. 2026-11-19, not measured yet."""
    num_pairs = num_tokens * num_chosen
    distinct = num_matrices * (1 - (1 - num_chosen / max(num_chosen, num_matrices)) ** num_tokens)
    return num_pairs <= MAX_GROUPED_GEMV_PAIRS and num_pairs <= MAX_READ_AGAIN * distinct


def grouped_tile(num_pairs: int, num_matrices: int, itemsize: int, has_large_smem: bool) -> GemmTile:
    """Return the tile of a product whose rows choose among matrices evenly. An FP8 sum's order depends on `num_inputs`,
    which is fixed. 2026-11-19, not measured yet."""
    each = -(-num_pairs // num_matrices)
    rows = next((size for size in GROUPED_TILE_ROWS if size >= each), GROUPED_TILE_ROWS[-1])
    if itemsize == 4:  # no tensor-core instruction
        return GemmTile(64, min(rows, 32), 32, 4, 2)
    if rows <= GROUPED_TILE_ROWS[1]:
        return GemmTile(64, rows, 128, 4, 5 if has_large_smem else 3)
    inputs = 128 // itemsize
    if rows < GROUPED_TILE_ROWS[-1]:
        return GemmTile(128, rows, inputs, 4, 4 if has_large_smem else 3)
    return GemmTile(128, rows, inputs, 8, 4 if has_large_smem else 2)


def lora_split(width: int, block: int) -> tuple[int, int]:
    """Return how many inputs a split has, in whole blocks, and how many splits there are. They set the order of sums,
    so the number of rows must not matter. 2026-11-19."""
    num_splits = max(1, min(MAX_LORA_SPLITS, width // (2 * block)))
    share = -(-width // (num_splits * block)) * block
    return share, -(-width // share)


def lora_tile_rows(num_rows: int) -> int:
    """Return the rows of a tile with one adapter. 2026-11-19, not varied."""
    return LORA_TILE_ROWS[num_rows > MAX_FEW_LORA_ROWS]


def grouped_row_limits(num_chosen: int, num_matrices: int) -> tuple[int, ...]:
    """Return the numbers of rows up to which a grouped product takes one kernel, and beyond which another."""
    tokens = range(1, MAX_GROUPED_GEMV_PAIRS // num_chosen + 1)
    few = [count for count in tokens if uses_grouped_gemv(count, num_chosen, num_matrices)]
    pairs = [*SORT_BLOCKS[:-1], *(rows * num_matrices for rows in GROUPED_TILE_ROWS[:-1])]
    return tuple(sorted({*few[-1:], *(count // num_chosen for count in pairs if count >= num_chosen)}))


def round_exact_rows(num_rows: int) -> int:
    """Round up, so that few algorithms are asked for."""
    step = EXACT_ROWS_STEP
    while num_rows > EXACT_ROWS_STEPS * step:
        step *= 2
    return -(-num_rows // step) * step


def skinny_stages(width: int, has_large_smem: bool) -> int:
    """Return the pipeline stages of the skinny GEMM; Ada's shared memory has room for three. 2026-11-15."""
    return 3 if not has_large_smem else 6 if width > 2048 else 4


def int_gemv_shape(num_units: int, num_out: int) -> tuple[int, int]:
    """Return outputs per program and units of 4 words read at a time. 2026-11-16."""
    rows = min(8, max(1, (1 << (num_out // 512).bit_length()) // 2))
    if num_units <= 256:
        return rows, 1 << max(0, num_units - 1).bit_length()
    return rows, 64 if num_units % 128 and num_units <= 1024 else 128


class DotShape(NamedTuple):
    """The shape of a program of integer dot products."""

    has_two_panels: bool  # of 8 outputs, or 8 gates and their ups
    num_pairs: int  # of groups of inputs, at a time
    num_warps: int


def int_dot_shape(num_out: int, num_pairs: int, bits: int, is_gated: bool) -> DotShape:
    """Return the shape for so many outputs and pairs of groups. 2026-11-19, the 8B's matrices."""
    if num_out >= MIN_MANY_DOT_OUTPUTS:
        has_two, pairs, num_warps = True, 8, 4
    elif num_out > MIN_WIDE_TILE_OUTPUTS:
        has_two, pairs, num_warps = bits == 8, 16, 8
    else:
        has_two, pairs, num_warps = True, 32, 8
    pairs = min(pairs, 1 << max(0, num_pairs - 1).bit_length())
    return DotShape(has_two or is_gated, pairs, num_warps)


def int_tile_shape(num_rows: int, num_out: int, num_pairs: int) -> tuple[int, int, int, int, int]:
    """Return outputs, rows, pairs and warps of an integer tile, and how many programs to aim for. 2026-11-16."""
    rows = next(size for size in INT_TILE_ROWS if size >= num_rows)
    if rows == INT_TILE_ROWS[0] or num_out < MIN_WIDE_TILE_OUTPUTS:
        return 64, rows, 1 if num_pairs % 2 else 2, 2, 660
    if num_out * num_pairs * 64 < MIN_LARGE_WEIGHT:
        return 128, rows, 1, 4, 264
    return 256, rows, 1, 8, 132 if rows == INT_TILE_ROWS[-1] else 170


class GroupTile(NamedTuple):
    """The shape of a program of 8-bit floats in groups, and how many of them to aim for."""

    num_outs: int
    num_rows: int
    num_inputs: int  # at a time
    num_warps: int
    num_programs: int

    def sizes(self, width: int) -> tuple[int, int, int, int, bool]:
        """Return the kernel arguments OUTPUTS, ROWS, BLOCK, STAGES and EVEN for so many inputs."""
        return self.num_outs, self.num_rows, self.num_inputs, FP8_GROUP_STAGES, width % self.num_inputs == 0


def fp8_tile_shape(num_rows: int, group: int, itemsize: int) -> GroupTile:
    """Return the tile for so many rows and groups of a multiple of 32 inputs. 2026-11-19, not measured yet."""
    rows = next((size for size in INT_TILE_ROWS if size >= num_rows), INT_TILE_ROWS[-1])
    if itemsize == 4:  # no tensor-core instruction
        return GroupTile(64, min(rows, 32), 32, 4, 264)
    is_small, is_largest = rows <= MAX_WIDE_BLOCK_ROWS, rows == INT_TILE_ROWS[-1]
    inputs = 128 if is_small else 64
    while group % inputs:
        inputs //= 2
    return GroupTile(128 if is_largest else 64, rows, inputs, 8 if is_largest else 4, 528 if is_small else 264)


class DecodeRead(NamedTuple):
    """The reads of a program of decode attention."""

    num_keys: int  # at a time
    num_stages: int
    num_warps: int = 4


def decode_read_shape(
    num_sequences: int, head_block: int, dtype: torch.dtype, cache_dtype: torch.dtype, is_shared: bool = False
) -> DecodeRead:
    """Return the reads of decode attention. 2026-11-15; FP8 2026-11-18, 256 to 1024 sequences of 300 to 2000 tokens."""
    if dtype == torch.float32:
        return DecodeRead(64 if head_block <= MAX_FULL_TILE_HEAD_SIZE else 32, 1)
    if head_block > MAX_FULL_TILE_HEAD_SIZE:
        return DecodeRead(32, 3)
    if is_shared:
        return DecodeRead(32, 2)
    if num_sequences > MAX_WIDE_READ_ROWS and cache_dtype.itemsize == 1:
        return DecodeRead(128, 2, 2)
    return DecodeRead(128 if MIN_WIDE_READ_ROWS <= num_sequences <= MAX_WIDE_READ_ROWS else 64, 2)


def latent_read_shape(num_rows: int, itemsize: int, is_hopper: bool, has_large_smem: bool) -> DecodeRead:
    """Return the reads of attention over latents, whose queries lie in shared memory: only Hopper's has room for two
    stages of many. 2026-11-19, not measured yet."""
    if itemsize == 4:
        return DecodeRead(16, 1, 4)
    if num_rows > 32:
        return DecodeRead(32, 2 if is_hopper else 1, 8)
    return DecodeRead(64 if has_large_smem else 32, 2 if has_large_smem else 1, 4)


def tile_options(head_block: int, dtype: torch.dtype, has_large_smem: bool) -> dict[str, Any]:
    """Return launch options of a prefill attention tile; two stages of wide heads exceed Ada's 99 KiB. 2026-11-16."""
    is_wide, is_float32 = head_block > MAX_FULL_TILE_HEAD_SIZE, dtype == torch.float32
    limit = {} if is_float32 or is_wide else {"maxnreg": MAX_TILE_REGISTERS}
    return {"num_warps": 8, "num_stages": 1 if is_float32 or (is_wide and not has_large_smem) else 2, **limit}
