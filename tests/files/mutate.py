"""Damage that knows the formats: most of it goes to headers, counts, lengths, offsets and types."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

Files = dict[str, bytes | None]  # None: the file is gone
Mutated = tuple[bytes, str, bool]  # content, what was done, whether it was done to the structure

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
EDGES = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    1 << 15,
    (1 << 16) - 1,
    1 << 16,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 32,
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-12, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"), 10000.0)
WORDS = (
    "",
    "llama",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
    "gpt2",
    "bert",
    "linear",
    "yarn",
    "longrope",
    "none",
    "é",
    "default",
    "x" * 300,
    "\0",
    "a\nb",
    "blk.0.attn_q.weight",
    "blk.7.attn_q.weight",
    "output.weight",
    "general.alignment",
)


@dataclass
class Record:
    """Bytes of one metadata entry or tensor description, and where its fields are: (start, size, kind)."""

    raw: bytes
    fields: list[tuple[int, int, str]]

    def put(self, start: int, size: int, content: bytes) -> Record:
        return Record(self.raw[:start] + content + self.raw[start + size :], self.fields)


@dataclass
class Gguf:
    head: Record
    entries: list[Record]
    tensors: list[Record]
    data: bytes

    @classmethod
    def of(cls, raw: bytes) -> Gguf:
        """The parts of a healthy file."""
        num_tensors, num_entries = struct.unpack_from("<QQ", raw, 8)
        at, entries, tensors = 24, [], []
        for _ in range(num_entries):
            entries.append(_entry(raw, at))
            at += len(entries[-1].raw)
        for _ in range(num_tensors):
            tensors.append(_tensor(raw, at))
            at += len(tensors[-1].raw)
        head = Record(raw[:24], [(0, 4, "text"), (4, 4, "integer"), (8, 8, "integer"), (16, 8, "integer")])
        return cls(head, entries, tensors, raw[-(-at // 32) * 32 :])

    def counted(self) -> bytes:
        """The file with the counts its parts have."""
        self.head = self.head.put(8, 16, struct.pack("<QQ", len(self.tensors), len(self.entries)))
        return bytes(self)

    def __bytes__(self) -> bytes:
        front = b"".join(record.raw for record in (self.head, *self.entries, *self.tensors))
        return front + bytes(-len(front) % 32) + self.data


def _string(raw: bytes, at: int, fields: list[tuple[int, int, str]], base: int) -> int:
    size = struct.unpack_from("<Q", raw, at)[0]
    fields += [(at - base, 8, "integer"), (at - base + 8, size, "text")]
    return at + 8 + size


def _entry(raw: bytes, base: int) -> Record:
    fields: list[tuple[int, int, str]] = []
    at = _string(raw, base, fields, base)
    kind, at = struct.unpack_from("<I", raw, at)[0], at + 4
    fields.append((at - 4 - base, 4, "type"))
    count = 1
    if kind == 9:
        kind, count = struct.unpack_from("<IQ", raw, at)
        fields += [(at - base, 4, "type"), (at - base + 4, 8, "integer")]
        at += 12
    for _ in range(count):
        if kind == 8:
            at = _string(raw, at, fields, base)
        else:
            fields.append((at - base, SIZES[kind], FORMATS[kind]))
            at += SIZES[kind]
    return Record(raw[base:at], fields)


def _tensor(raw: bytes, base: int) -> Record:
    fields: list[tuple[int, int, str]] = []
    at = _string(raw, base, fields, base)
    count = struct.unpack_from("<I", raw, at)[0]
    fields.append((at - base, 4, "integer"))
    fields += [(at - base + 4 + 8 * number, 8, "integer") for number in range(count)]
    at += 4 + 8 * count
    fields += [(at - base, 4, "type"), (at - base + 4, 8, "integer")]
    return Record(raw[base : at + 12], fields)


def _number(old: int, bits: int, rng: Random, whole: int) -> int:
    near = (old + 1, old - 1, old * 2, old // 2, old ^ (1 << rng.randrange(bits)), whole, whole + 1)
    return rng.choice((*EDGES, *near, *near, rng.getrandbits(bits))) & ((1 << bits) - 1)


def _changed_field(record: Record, rng: Random, whole: int) -> Record:
    """One field of a record, changed within its size."""
    shape = [each for each in record.fields if each[1]]
    named = [each for each in shape if each[2] in ("integer", "type")]
    start, size, kind = rng.choice(named if named and rng.random() < 0.6 else shape)
    old = record.raw[start : start + size]
    if kind == "text":
        return record.put(start, size, flipped(old, rng, 1))
    if kind == "type":
        return record.put(start, size, struct.pack("<I", rng.choice((*range(42), rng.getrandbits(32)))))
    if kind in ("<f", "<d"):
        return record.put(start, size, struct.pack(kind, rng.choice(FLOATS)))
    value = _number(int.from_bytes(old, "little"), size * 8, rng, whole)
    return record.put(start, size, value.to_bytes(size, "little"))


def _changed_text(record: Record, rng: Random) -> Record:
    """A string of another length, and its length with it."""
    texts = [number for number, field in enumerate(record.fields) if field[2] == "text"]
    start, size, _ = record.fields[rng.choice(texts)]
    old = record.raw[start : start + size]
    word = rng.choice((rng.choice(WORDS).encode(), old[:-1], old + b"s", old[::-1]))
    return record.put(start - 8, size + 8, struct.pack("<Q", len(word)) + word)


def flipped(raw: bytes, rng: Random, most: int = 4) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, most)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _fields(file: Gguf, rng: Random) -> bytes:
    whole = len(bytes(file))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        records = rng.choice((file.entries, file.tensors, [file.head]))
        number = rng.randrange(len(records))
        changed = _changed_field(records[number], rng, whole)
        if records[number] is file.head:
            file.head = changed
        else:
            records[number] = changed
    return bytes(file)


def _texts(file: Gguf, rng: Random) -> bytes:
    records = rng.choice((file.entries, file.tensors))
    number = rng.randrange(len(records))
    records[number] = _changed_text(records[number], rng)
    return bytes(file)


def _records(file: Gguf, rng: Random) -> bytes:
    """Entries and descriptions dropped, repeated, moved or exchanged, with the counts that follow from it."""
    records = rng.choice((file.entries, file.tensors))
    first, second = rng.randrange(len(records)), rng.randrange(len(records))
    action = rng.randrange(4)
    if action == 0 and len(records) > 1:
        del records[first]
    elif action == 1:
        records.insert(second, records[first])
    elif action == 2:
        records[first], records[second] = records[second], records[first]
    else:  # the name of one with the body of another
        one, other = records[first], records[second]
        end, begin = sum(one.fields[1][:2]), sum(other.fields[1][:2])
        records[first] = Record(one.raw[:end] + other.raw[begin:], one.fields)
    return file.counted()


def _lengths(file: Gguf, rng: Random) -> bytes:
    raw = bytes(file)
    front = len(raw) - len(file.data)
    at = rng.randrange(front if rng.random() < 0.7 else len(raw))
    few = rng.randint(1, 16)
    return rng.choice(
        (raw[:at], raw[:at] + raw[at + few :], raw[:at] + rng.randbytes(few) + raw[at:], raw + rng.randbytes(few))
    )


def _bits(file: Gguf, rng: Random) -> bytes:
    raw = bytes(file)
    front = len(raw) - len(file.data)
    return flipped(raw[:front], rng) + raw[front:]


def _values(file: Gguf, rng: Random) -> bytes:
    if rng.random() < 0.5:
        file.data = flipped(file.data, rng, 64)
    else:
        at = rng.randrange(len(file.data))
        run = rng.choice((b"\0", b"\xff", b"\x7f", rng.randbytes(1))) * rng.randint(1, 512)
        file.data = (file.data[:at] + run)[: len(file.data)] + file.data[at + len(run) :]
    return bytes(file)


GGUF_DAMAGE: list[tuple[int, str, bool, Callable[[Gguf, Random], bytes]]] = [
    (45, "field", True, _fields),
    (10, "text", True, _texts),
    (14, "record", True, _records),
    (8, "length", True, _lengths),
    (8, "bit", True, _bits),
    (15, "data", False, _values),
]


def mutate_gguf(raw: bytes, rng: Random) -> Mutated:
    _, label, structural, damage = rng.choices(GGUF_DAMAGE, [each[0] for each in GGUF_DAMAGE])[0]
    return damage(Gguf.of(raw), rng), label, structural


JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    1 << 31,
    1 << 62,
    1 << 64,
    10**30,
    0.0,
    0.5,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "F32",
    "F16",
    "I64",
    "BOOL",
    "silu",
    "gelu",
    "relu",
    "default",
    "linear",
    "yarn",
    "dynamic",
    {},
    [],
    [0],
    [1, 2],
    [[]],
    {"a": 1},
    "x" * 100,
    "full_attention",
)
KEYS = (
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "head_dim",
    "num_key_value_heads",
    "layer_types",
    "unknown",
    "quantization_config",
    "config_groups",
    "weight_block_size",
    "desc_act",
    "checkpoint_format",
    "tie_word_embeddings",
    "max_position_embeddings",
    "num_experts",
    "text_config",
    "",
)


def _json_value(old: Any, rng: Random) -> Any:
    if type(old) in (int, float) and rng.random() < 0.5:
        return rng.choice((old + 1, old - 1, old * 2, -old, old / 2, old // 2, str(old), [old], float(old)))
    if isinstance(old, list) and old and rng.random() < 0.5:
        return rng.choice((old[:-1], [*old, old[0]], old[::-1], [*old, 1]))
    return rng.choice(JSON_VALUES)


def mutate_json(value: Any, rng: Random) -> Any:
    """One value somewhere inside, changed; or a key dropped, renamed or added."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        number = rng.randrange(len(value))
        return [*value[:number], mutate_json(value[number], rng), *value[number + 1 :]]
    if not isinstance(value, dict) or not value:
        return _json_value(value, rng)
    key = rng.choice(list(value))
    action = rng.random()
    if action < 0.08:
        return {name: each for name, each in value.items() if name != key}
    if action < 0.16:
        return value | {rng.choice((*KEYS, key + "x", key.upper())): rng.choice((value[key], *JSON_VALUES))}
    if action < 0.2:
        return {(name + "_" if name == key else name): each for name, each in value.items()}
    return value | {key: mutate_json(value[key], rng)}


def _json_text(raw: bytes, rng: Random) -> bytes:
    """A JSON document changed as a value, or as text: a flipped bit, a cut, a key repeated."""
    action = rng.random()
    if action < 0.75:
        return json.dumps(mutate_json(json.loads(raw), rng)).encode()
    if action < 0.85:
        return flipped(raw, rng)
    if action < 0.92:
        return raw[: rng.randrange(len(raw))]
    value = json.loads(raw)
    key = rng.choice(list(value))
    return b"{" + json.dumps(key).encode() + b": " + json.dumps(value[key]).encode() + b"," + raw.strip()[1:]


def _safetensors(raw: bytes, rng: Random) -> Mutated:
    size = struct.unpack_from("<Q", raw)[0]
    header, data = raw[8 : 8 + size], raw[8 + size :]
    action = rng.random()
    if action < 0.6:
        header = _json_text(header, rng)
        return struct.pack("<Q", len(header)) + header + data, "header", True
    if action < 0.72:
        return struct.pack("<Q", _number(size, 64, rng, len(raw))) + raw[8:], "length", True
    if action < 0.82:
        at = rng.randrange(len(raw))
        return rng.choice((raw[:at], raw + b"\0" * rng.randint(1, 9), raw[:at] + raw[at + 1 :])), "length", True
    return raw[: 8 + size] + flipped(data, rng, 64), "data", False


def mutate_folder(files: dict[str, bytes], rng: Random) -> tuple[Files, str, bool]:
    """One file of the folder changed or gone."""
    names = sorted(files)
    weights = [4 if name.endswith(".safetensors") else 1 if name.startswith("gen") else 3 for name in names]
    name = rng.choices(names, weights)[0]
    if rng.random() < 0.02:
        return {name: None}, "gone", True
    if name.endswith(".safetensors"):
        content, label, structural = _safetensors(files[name], rng)
        return {name: content}, label, structural
    return {name: _json_text(files[name], rng)}, name.partition(".")[0], True
