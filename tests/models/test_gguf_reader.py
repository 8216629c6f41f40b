"""The GGUF reader on sound, truncated and corrupt files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from enginecore.errors import ModelError
from enginecore.models.gguf_reader import GGUFFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 1.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve")
    writer.add_array("a.strings", ["x", "", "漢字"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.ones(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors(small: Path) -> None:
    file = GGUFFile(str(small))
    assert file.get("general.architecture") == "llama"
    assert (file.get("a.number"), file.get("a.float"), file.get("a.flag")) == (7, 1.5, True)
    assert file.get("a.text") == "naïve"
    assert file.get("a.strings") == ["x", "", "漢字"]
    assert file.raw_strings("a.strings")[2] == "漢字".encode()
    assert file.get("a.numbers").tolist() == [1, 2, 3]
    assert file.get("nothing", 3) == 3
    assert file.tensors["plain"].shape == (2, 3)
    assert file.data(file.tensors["plain"]).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_every_truncation_is_an_error_that_names_the_file(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    end = max(t.offset + t.nbytes for t in GGUFFile(str(small)).tensors.values())
    for size in range(end):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(str(cut))


@given(changes=st.lists(st.tuples(st.integers(4, 500), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_corruption_is_an_error_or_harmless(small: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(small.read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    path = small.with_name("corrupt.gguf")
    path.write_bytes(data)
    try:
        file = GGUFFile(str(path))
        for key in file.keys():  # noqa: SIM118 - it is a method, not a mapping
            file.get(key)
        for info in file.tensors.values():
            file.data(info)
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (struct.pack("<QQ", 0, 2**60), "keys are announced"),
        (struct.pack("<QQ", 2**60, 0), "keys are announced"),
        (struct.pack("<QQQ", 0, 1, 2**62), "claims"),
        (struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 2**63), "claims"),
        (struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**61), "claims .* strings"),
        (struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQQ", 9, 8, 1, 2**63), "inside the strings|claims"),
        (struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62), "claims .* items"),
        (struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "unsupported type"),
        (struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown type"),
        (struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "dimensions"),
        (struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 32, 77, 0), "ggml type 77"),
        (struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 2**30, 0, 0), "needs"),
        (struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 33, 8, 0), "rows of 33"),
    ],
)
def test_huge_claims_cost_nothing(tail: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "evil.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + tail + bytes(64))
    with pytest.raises(ModelError, match=message):
        GGUFFile(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (b"GGUF", "4 bytes"),
        (b"PK\x03\x04" + bytes(40), "starts with"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GGUFFile(str(path))
