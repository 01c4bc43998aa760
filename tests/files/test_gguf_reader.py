"""The GGUF reader: what it reads, and that each kind of damage is refused by name before anything is made of it."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from layout import ARRAY, BOOL, F32, STRING, U32, U64, Layout, entry, tensor, text, u32, u64

from penstock.errors import InvalidModel
from penstock.models.files import gguf as reader
from penstock.models.files.gguf import GgufFile

ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


def opened(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    values = {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "bool": True,
        "string": "Ġgrüße",
        "empty": "",
    }
    for kind, value in values.items():
        name = {"u": "UINT", "i": "INT", "f": "FLOAT"}.get(kind[0], "") + kind[1:]
        known = {"bool": "BOOL", "string": "STRING", "empty": "STRING"}
        writer.add_key_value(f"x.{kind}", value, gguf.GGUFValueType[known.get(kind, name)])
    writer.add_array("x.words", ["a", "", "日本", "Ġ"])
    writer.add_array("x.numbers", [1.5, -2.0])
    writer.add_array("x.flags", [True, False])
    weight = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("w", weight)
    writer.add_tensor("v", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    assert {key[2:]: file.metadata[key] for key in file.metadata if key.startswith("x.")} == values | {
        "words": ["a", "", "日本", "Ġ"],
        "numbers": [1.5, -2.0],
        "flags": [True, False],
    }
    assert file.metadata["x.bool"] is True and type(file.metadata["x.u8"]) is int
    assert file.tensors["w"].shape == (2, 3, 4) and file.tensors["v"].ggml_type == 1
    assert np.array_equal(file.raw(file.tensors["w"]).view(np.float32).reshape(2, 3, 4), weight)


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    layout = Layout(
        version=u32(2),
        alignment=64,
        entries=[ARCHITECTURE, entry("general.alignment", U32, u32(64))],
        tensors=[tensor("a", (16,), 0, 0), tensor("b", (4,), 0, 64)],
    )
    file = opened(tmp_path, bytes(layout))
    assert file.version == 2 and file.tensors["b"].start % 64 == 0
    assert bytes(file.raw(file.tensors["b"])) == bytes(range(64, 80))


REFUSALS = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "magic number at byte 0 needs 4 bytes, 2 are left"),
    "magic": (Layout(magic=b"GGML"), "begins with b'GGML'"),
    "version 1": (Layout(version=u32(1)), "version 1"),
    "version 4": (Layout(version=u32(4)), "version 4; versions 2 and 3"),
    "version 0": (Layout(version=u32(0)), "version 0; versions 2 and 3"),
    "big endian": (Layout(version=struct.pack(">I", 3)), "big-endian"),
    "no tensors": (Layout(tensors=[]), "0 tensors"),
    "tensor count": (Layout(num_tensors=2**63), "9223372036854775808 tensors"),
    "one tensor too many": (Layout(num_tensors=3, data=b""), "tensor '' has no name|name of tensor 2"),
    "entry count": (Layout(num_entries=2**64 - 1), "18446744073709551615 metadata keys"),
    "key length": (Layout(entries=[u64(2**40) + b"x"]), "metadata key 0 at byte"),
    "key twice": (Layout(entries=[ARCHITECTURE, ARCHITECTURE]), "'general.architecture' is empty or duplicated"),
    "key empty": (Layout(entries=[entry("", U32, u32(1))]), "'' is empty or duplicated"),
    "key not text": (Layout(entries=[text(b"\xff\xfe") + u32(U32) + u32(1)]), "metadata key 0 is not UTF-8"),
    "value type": (Layout(entries=[entry("k", 13, u32(1))]), "'k' has the unknown value type 13"),
    "bool 2": (Layout(entries=[entry("k", BOOL, b"\x02")]), "neither 0 nor 1"),
    "string length": (Layout(entries=[entry("k", STRING, u64(2**64 - 1))]), "'k' at byte"),
    "array length": (Layout(entries=[entry("k", ARRAY, u32(F32) + u64(2**21))]), "'k' at byte .* needs 8388608 bytes"),
    "array elements": (Layout(entries=[entry("k", ARRAY, u32(F32) + u64(2**60))]), "all arrays together may have"),
    "array type": (Layout(entries=[entry("k", ARRAY, u32(99) + u64(1))]), "unknown value type 99"),
    "array of arrays": (Layout(entries=[entry("k", ARRAY, u32(ARRAY) + u64(1))]), "array of arrays"),
    "strings break off": (
        Layout(entries=[entry("k", ARRAY, u32(STRING) + u64(2**20))], tensors=[], num_tensors=2, data=b""),
        "'k' ends at string .* of 1048576",
    ),
    "string in array": (Layout(entries=[entry("k", ARRAY, u32(STRING) + u64(1) + u64(2**50))]), "string 0 needs"),
    "alignment 12": (Layout(entries=[entry("general.alignment", U32, u32(12))]), "general.alignment is 12"),
    "alignment 0": (Layout(entries=[entry("general.alignment", U32, u32(0))]), "power of two"),
    "alignment text": (Layout(entries=[entry("general.alignment", STRING, text("32"))]), "general.alignment is '32'"),
    "alignment huge": (Layout(entries=[entry("general.alignment", U64, u64(2**62))]), "power of two"),
    "name twice": (Layout(tensors=[tensor("a", (4,), 0, 0)] * 2), "'a' has no name or is duplicated"),
    "name empty": (Layout(tensors=[tensor("", (4,), 0, 0)]), "'' has no name"),
    "no dimensions": (Layout(tensors=[tensor("a", (), 0, 0)]), "0 dimensions"),
    "five dimensions": (Layout(tensors=[tensor("a", (1,) * 5, 0, 0)]), "5 dimensions"),
    "zero dimension": (Layout(tensors=[tensor("a", (4, 0), 0, 0)]), "impossible shape"),
    "overflow": (Layout(tensors=[tensor("a", (2**32, 2**32), 0, 0)]), "impossible shape"),
    "wraps to small": (Layout(tensors=[tensor("a", (2**61, 4), 0, 0)]), "impossible shape"),
    "tensor type": (Layout(tensors=[tensor("a", (4,), 77, 0)]), "type 77 .unknown. is not supported; use a file"),
    "known unsupported": (Layout(tensors=[tensor("a", (256,), 15, 0)]), "Q8_K"),
    "half a block": (Layout(tensors=[tensor("a", (33,), 8, 0)]), "Q8_0 blocks of 32"),
    "offset unaligned": (Layout(tensors=[tensor("a", (4,), 0, 16)]), "offset 16, not a multiple of the alignment 32"),
    "offset outside": (Layout(tensors=[tensor("a", (4,), 0, 96)]), "ends at byte"),
    "offset huge": (Layout(tensors=[tensor("a", (4,), 0, 2**64 - 32)]), "ends at byte"),
    "too long": (Layout(tensors=[tensor("a", (2**40,), 0, 0)]), "ends at byte"),
    "overlap": (Layout(tensors=[tensor("a", (16,), 0, 0), tensor("b", (4,), 0, 32)]), "'b' begins at byte .* inside"),
    "same place": (Layout(tensors=[tensor("a", (4,), 0, 0), tensor("b", (4,), 0, 0)]), "inside the one before"),
    "data missing": (Layout(data=b""), "ends at byte"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_damage_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, reason = REFUSALS[name]
    with pytest.raises(InvalidModel, match=reason) as caught:
        opened(tmp_path, bytes(content))
    message = str(caught.value)
    assert str(tmp_path / "model.gguf") in message and "\n" not in message and len(message) < 600


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = bytes(Layout())
    assert opened(tmp_path, whole).tensors["b"].shape == (4,)
    for length in range(len(whole)):
        with pytest.raises(InvalidModel):
            opened(tmp_path, whole[:length])


def test_long_names_are_cut_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel) as caught:
        opened(tmp_path, bytes(Layout(entries=[entry("k" * 5000 + "\n", 13, u32(1))])))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    """262,144 tokens, as Gemma's. The bound is generous: a call per token and byte would take ten times as long."""
    tokens = b"".join(text(f"▁token{number}") for number in range(1 << 18))
    scores = np.linspace(0, -1, 1 << 18, dtype=np.float32).tobytes()
    layout = Layout(
        entries=[
            ARCHITECTURE,
            entry("tokens", ARRAY, u32(STRING) + u64(1 << 18) + tokens),
            entry("scores", ARRAY, u32(F32) + u64(1 << 18) + scores),
        ]
    )
    begin = time.process_time()
    file = opened(tmp_path, bytes(layout))
    assert time.process_time() - begin < 5
    assert file.metadata["tokens"][-1] == "▁token262143" and len(file.metadata["scores"]) == 1 << 18


def test_limits_hold_over_all_arrays_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [entry(f"k{number}", ARRAY, u32(0) + u64(60) + bytes(60)) for number in range(3)]
    monkeypatch.setattr(reader, "MAX_ELEMENTS", 150)
    with pytest.raises(InvalidModel, match="'k2' has 60 elements; all arrays together may have 150"):
        opened(tmp_path, bytes(Layout(entries=arrays)))
    monkeypatch.setattr(reader, "MAX_METADATA_BYTES", 100)
    with pytest.raises(InvalidModel, match="up to 'k1' takes more than 100 bytes"):
        opened(tmp_path, bytes(Layout(entries=arrays)))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(InvalidModel, match="cannot be read"):
        GgufFile(tmp_path)


def test_closing_twice_and_with_a_view_alive_is_harmless(tmp_path: Path) -> None:
    file = opened(tmp_path, bytes(Layout()))
    view = file.raw(file.tensors["b"])
    file.close()
    assert view[0] == 64
    del view
    file.close()
    file.close()
