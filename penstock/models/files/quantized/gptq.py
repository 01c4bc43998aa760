"""GPTQ and AWQ: codes in 32-bit words, with scales and zeros in packed words for each group of inputs.

GPTQ packs a word along the inputs, qweight [C · bits / 32, O], and may name a group for each input (`g_idx`); AWQ packs
eight outputs into a word, in its own order: qweight [C, O / 8]. Zeros are packed along the outputs: [G, O · bits / 32].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.models.config import Config
from penstock.models.files.quantized.matrix import (
    FLOATS,
    PartHeader,
    Parts,
    QuantizedMatrix,
    fits_kernel,
    name_group,
    sort_groups,
)
from penstock.quant.bits import unpack_awq, unpack_words
from penstock.quant.coded import Coded

MAX_GROUP = 1 << 20
BITS = (2, 3, 4, 8)

# How a model was made, and which kernels its authors run.
GPTQ_HARMLESS = tuple(
    """
    damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta dataset
    tokenizer use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length block_name_to_quantize
    module_name_preceding_first_block batch_size pad_token_id model_seqlen cache_block_outputs backend
    modules_in_block_to_quantize mse act_group_aware hyb_act sym desc_act actorder dynamic quantizer lm_head
    offload_to_disk pack_impl v2 is_quantized autoround_version iters lr minmax_lr enable_minmax_tuning
    enable_quanted_input gradient_accumulate_steps nsamples seqlen train_bs scale_dtype amp low_gpu_mem_usage data_type
""".split()
)
AWQ_HARMLESS = (*GPTQ_HARMLESS, "modules_to_not_convert", "ignore", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")


def _read_group(c: Config, *names: str) -> int:
    size = c.count(*names, default=-1, least=-1, most=MAX_GROUP)
    if len({c.values[name] for name in names if c.values.get(name) is not None}) > 1:
        c.refuse(names[0], f"contradicts another of {', '.join(names)}: keep one of them")
    if size == 0:
        c.refuse(names[0], "must be -1 for whole rows, or 1 and more")
    return size


def find_gptq(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    """Find the matrices of a GPTQ folder. Bits and groups follow from each one's shapes, so that they may differ."""
    bits = c.count("bits", "w_bit", most=8)
    if bits not in BITS:
        c.refuse("bits", f"is not supported: the known ones are {', '.join(map(str, BITS))}")
    group = _read_group(c, "group_size", "q_group_size", "groupsize")
    is_v2 = c.choice("checkpoint_format", "format", choices={"gptq": False, "gptq_v2": True}, default="gptq")
    c.only("is_marlin_format", False)
    c.only("pack_dtype", "int32")
    if c.values.get("format", given := c.values.get("checkpoint_format")) != given and given is not None:
        c.refuse("format", f"contradicts checkpoint_format={given!r}: keep the one that its writer meant")
    c.ignore("checkpoint_format", "format", *GPTQ_HARMLESS)
    is_ordered = bool(c.values.get("desc_act") or c.values.get("actorder")) and not c.values.get("static_groups")
    usual = Usual(bits, group, is_v2, bool(c.values.get("dynamic")), is_ordered)
    return [_find_gptq(parts, module, words, usual) for module, words in parts.modules("qweight")]


@dataclass(frozen=True)
class Usual:
    """A GPTQ config's own settings, from which single modules may differ."""

    bits: int
    group: int  # -1: whole rows
    is_v2: bool
    may_differ: bool
    is_ordered: bool = False  # an input's group is that of g_idx

    def find_bits(self, zeros: PartHeader, num_groups: int, num_out: int, num_words: int) -> int:
        """Return the bits that zeros of this shape have; 0 if there are none."""
        possible = [self.bits, *(bits for bits in BITS if bits != self.bits and self.may_differ)]
        fitting = [
            bits
            for bits in possible
            if zeros.shape == (num_groups, -(-num_out * bits // 32)) and num_words * 32 % bits == 0
        ]
        return fitting[0] if fitting else 0

    def find_group(self, num_groups: int, width: int) -> int:
        """Return the group size that makes these groups; 0 if none does."""
        group = width if self.group == -1 else self.group
        if -(-width // group) != num_groups and self.may_differ:
            group = -(-width // num_groups)
        return group if -(-width // group) == num_groups else 0


def _find_gptq(parts: Parts, module: str, words: PartHeader, usual: Usual) -> QuantizedMatrix:
    num_words, num_out = parts.check_matrix(parts.check(words, "int32"))
    scale = parts.check(parts.need(f"{module}.scales", words), FLOATS)
    num_groups, _ = parts.check_matrix(parts.check(scale, FLOATS, (scale.shape[0] if scale.shape else 1, num_out)))
    zeros = parts.check(parts.need(f"{module}.qzeros", words), "int32")
    bits = usual.find_bits(zeros, num_groups, num_out, num_words)
    if not bits:
        parts.refuse(zeros, f"has shape {list(zeros.shape)}, not that of {num_out} outputs' zeros of {usual.bits} bits")
    width = num_words * 32 // bits
    group = usual.find_group(num_groups, width)
    if not group:
        parts.refuse(scale, f"has {num_groups} groups, not those of group_size={usual.group} of {width} inputs")
    index = parts.find(f"{module}.g_idx")
    if index is None and usual.is_ordered and num_groups > 1:
        parts.need(f"{module}.g_idx", words)
    if index is not None:
        parts.check(index, ("int32", "int64"), (width,))
    used = tuple(part.name for part in (words, scale, zeros, index) if part is not None)

    def read() -> Coded:
        codes = unpack_words(parts.read(words).t(), bits, width)
        stored = unpack_words(parts.read(zeros), bits, num_out).t()
        points = stored if usual.is_v2 else stored + 1 & (1 << bits) - 1
        order, groups = (None, None) if index is None else _read_order(parts, index, num_groups, group)
        codes = codes if order is None else codes[:, order]
        return Coded(codes, parts.read_scale(scale).t(), group, _unite(points, bits), bits, order=order, groups=groups)

    kind = name_group(bits, group, width)
    return QuantizedMatrix(f"{module}.weight", (num_out, width), kind, used, read, fits_kernel(group, width))


def _read_order(
    parts: Parts, index: PartHeader, num_groups: int, group: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return sort_groups(parts.check_range(index, parts.read(index), num_groups), group)


def _unite(zeros: torch.Tensor, bits: int) -> int | torch.Tensor:
    """Return the middle of the codes where all zeros are there, as in symmetric files."""
    middle = 1 << bits - 1
    return middle if bool((zeros == middle).all()) else zeros


def find_awq(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    c.only("bits", 4)
    c.only("w_bit", 4)
    group = _read_group(c, "group_size", "q_group_size")
    c.only("zero_point", True, False)  # either way a value is its code less its zero
    for key in ("version", "format", "checkpoint_format"):
        form = c.values.get(key)
        if form is not None and str(form).lower() != "gemm":
            c.refuse(key, "is another order of weights than gemm, which is the one that is read: save it as gemm")
    c.only("pack_dtype", "int32")
    c.ignore("version", "format", "checkpoint_format", *AWQ_HARMLESS)
    return [_find_awq(parts, module, words, group) for module, words in parts.modules("qweight")]


def _find_awq(parts: Parts, module: str, words: PartHeader, asked: int) -> QuantizedMatrix:
    width, num_words = parts.check_matrix(parts.check(words, "int32"))
    num_out, group = 8 * num_words, width if asked == -1 else asked
    if width % group:
        parts.refuse(words, f"has {width} inputs, which group_size={group} does not divide")
    num_groups = width // group
    scale = parts.check(parts.need(f"{module}.scales", words), FLOATS, (num_groups, num_out))
    zeros = parts.check(parts.need(f"{module}.qzeros", words), "int32", (num_groups, num_words))

    def read() -> Coded:
        codes = unpack_awq(parts.read(words)).t().contiguous()
        points = unpack_awq(parts.read(zeros)).t()
        return Coded(codes, parts.read_scale(scale).t(), group, _unite(points, 4), 4)

    used = (words.name, scale.name, zeros.name)
    kind = name_group(4, group, width)
    return QuantizedMatrix(f"{module}.weight", (num_out, width), kind, used, read, fits_kernel(group, width))
