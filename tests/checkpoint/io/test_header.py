"""Headers: what is read back, and every way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.checkpoint.io.header import (
    DTYPE_BITS,
    MAX_HEADER,
    encodable,
    encode_header,
    read_header,
    tensor_bytes,
)
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import raw_file, safetensors_bytes


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"b": np.ones((2, 3), np.float32), "a": np.ones((), np.uint8)}))
    header = read_header(path)
    assert list(header.tensors) == ["b", "a"]
    info = header.tensors["b"]
    assert (info.dtype, info.shape, info.bytes, info.stop) == ("F32", (2, 3), 24, header.file_size - 1)
    assert np.fromfile(path, np.float32, 6, offset=info.start).tolist() == [1.0] * 6


def test_an_encoded_header_is_read_back_and_aligned(tmp_path: Path) -> None:
    tensors = [("w", "BF16", (3, 5)), ("né", "U8", (7,)), ("s", "F32", ())]
    raw = encode_header(tensors, {"format": "pt"})
    assert len(raw) % 8 == 0
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw + bytes(30 + 7 + 4))
    header = read_header(path)
    assert [(info.name, info.dtype, info.shape) for info in header.tensors.values()] == tensors
    assert header.metadata == {"format": "pt"}
    assert header.tensors["w"].start == len(raw)


def test_two_outputs_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two output tensors are called w"):
        encode_header([("w", "U8", (1,)), ("w", "U8", (1,))], {})


HOSTILE = {
    "too short for a safetensors file": b"\1\0\0",
    "exceeds the limit": struct.pack("<Q", MAX_HEADER + 1) + b"{}",
    "it is truncated": struct.pack("<Q", 100) + b"{}",
    "is no JSON": raw_file(b"{not json", b""),
    "no JSON": raw_file(b"\xff\xfe{}", b""),
    "is a JSON list, not an object": raw_file([], b""),
    "has a name that is no Unicode text": raw_file(
        b'{"a\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8)
    ),
    "names 'a' twice": raw_file(b'{"a": {}, "a": {}}', b""),
    "needs exactly dtype, shape and data_offsets": raw_file({"a": {"dtype": "F32"}}, b""),
    "needs exactly dtype": raw_file({"a": [1]}, b""),
    "has dtype 'F7'; known": raw_file({"a": entry("F7")}, bytes(8)),
    "which is no list of sizes": raw_file({"a": entry(shape=[-2])}, bytes(8)),
    "no list of sizes": raw_file({"a": entry(shape=[2.0])}, bytes(8)),
    "is no list": raw_file({"a": entry(shape="2")}, bytes(8)),
    "which are no two positions": raw_file({"a": entry(offsets=[0])}, bytes(8)),
    "are no two positions": raw_file({"a": entry(offsets=[-8, 0])}, bytes(8)),
    "needs 8 bytes, but data_offsets span 4": raw_file({"a": entry(offsets=[0, 4])}, bytes(4)),
    "data_offsets span -8": raw_file({"a": entry(offsets=[8, 0])}, bytes(8)),
    "needs 3.68935e+19 bytes": raw_file({"a": entry(shape=[2**62, 2])}, bytes(8)),
    "tensor b overlaps a": raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "belong to no tensor": raw_file({"a": entry(offsets=[8, 16])}, bytes(16)),
    "4 bytes after the last tensor": raw_file({"a": entry()}, bytes(12)),
    "but the file has": raw_file({"a": entry()}, bytes(7)),
    "must map names to texts": raw_file({"__metadata__": {"a": 1}}, b""),
    "a pickle (or zip) file": b"PK\3\4" + bytes(100),
    "is a pickle": b"\x80\x02}q\0." + bytes(10),
}


@pytest.mark.parametrize("length", [640, 1152, 19280, 640 + 65536])
def test_a_header_whose_length_begins_like_a_pickle(tmp_path: Path, length: int) -> None:
    """Little-endian, 640 is 80 02 and 19280 is "PK"."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw_file(json.dumps({"a": entry()}).encode().ljust(length), bytes(8)))
    assert list(read_header(path).tensors) == ["a"]


@pytest.mark.parametrize("message", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path: Path, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(HOSTILE[message])
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw_file(b"[" * 200_000, b""))
    with pytest.raises(CheckpointError, match="no JSON"):
        read_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.safetensors")


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw_file({"a": entry(shape=[0], offsets=[0, 0]), "b": entry()}, bytes(8)))
    assert read_header(path).tensors["a"].bytes == 0


def test_the_limit_is_on_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    text = json.dumps({"a": entry()}).encode()
    path.write_bytes(raw_file(text + b" " * 1000, bytes(8)))
    assert list(read_header(path).tensors) == ["a"]


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_raise(raw: bytes) -> None:
    read_or_refuse(raw)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_no_changed_byte_does_anything_but_raise(position: int, value: int) -> None:
    """Either the file is refused, or its tensors still lie within it, one after the other."""
    whole = bytearray(safetensors_bytes({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.uint8)}))
    whole[position % len(whole)] = value
    read_or_refuse(bytes(whole))


def read_or_refuse(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.safetensors"
        path.write_bytes(raw)
        try:
            header = read_header(path)
        except CheckpointError:
            return
    ends = [(info.start, info.stop) for info in header.tensors.values()]
    assert [start for start, _ in ends[1:]] == [stop for _, stop in ends[:-1]]
    assert not ends or ends[-1][1] == len(raw)


def test_a_tensor_that_is_named_twice_is_told_by_name(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = f'{{"first":{entry},"second":{entry},"third":{entry},"second":{entry}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header names 'second' twice$"):
        read_header(path)


def refused(path: Path, raw: bytes) -> str:
    """The message for a file, without its path."""
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return str(caught.value).removeprefix(f"{path}: ")


def test_both_sides_of_every_limit_of_the_length(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert MAX_HEADER == 100_000_000
    assert refused(path, bytes(7)) == "7 bytes are too short for a safetensors file"
    assert refused(path, bytes(8)).startswith("the header is no JSON")
    truncated = "the header needs 100000008 bytes, but the file has 8: it is truncated"
    assert refused(path, struct.pack("<Q", MAX_HEADER)) == truncated
    limit = "a header of 100000001 bytes exceeds the limit of 100000000; not safetensors?"
    assert refused(path, struct.pack("<Q", MAX_HEADER + 1)) == limit
    assert refused(path, struct.pack("<Q", 3) + b"{}") == (
        "the header needs 11 bytes, but the file has 10: it is truncated"
    )
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert read_header(path).tensors == {}


@pytest.mark.parametrize("magic", [b"PK", b"\x80\x02", b"\x80\x04"])
def test_pickles_of_every_kind(tmp_path: Path, magic: bytes) -> None:
    """Also one whose length would fit a file one byte longer, and one of two bytes."""
    said = "this is a pickle (or zip) file, not safetensors; convert it to safetensors first"
    path = tmp_path / "a.safetensors"
    length = int.from_bytes(magic, "little")
    assert refused(path, magic + bytes(6) + bytes(length - 1)) == said
    assert refused(path, magic) == said
    assert refused(path, magic + bytes(6) + bytes(length)).startswith("the header is no JSON")
    assert refused(path, b"\x80\x03" + bytes(6)).startswith("the header needs 904 bytes, but the file has 8")


def test_what_is_wrong_with_entries(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def said(data: int = 8, **entries: object) -> str:
        return refused(path, raw_file(entries, bytes(data)))

    exactly = "needs exactly dtype, shape and data_offsets"
    assert said(a=entry() | {"more": 1}) == f"tensor 'a' {exactly}"
    assert said(a=entry(dtype=8)) == f"tensor a has dtype 8; known: {', '.join(DTYPE_BITS)}"  # type: ignore[arg-type]
    for shape in ([2.0], [True], [-1], [2**63], {"2": 2}, None):
        wanted = f"tensor a has shape {json.loads(json.dumps(shape))!r}, which is no list of sizes"
        assert said(a=entry(shape=shape)) == wanted
    for offsets in ([0], [0, 4, 8], [0, 8.0], [False, 8], [-1, 7], {"0": 8}, None):
        wanted = f"tensor a has data_offsets {json.loads(json.dumps(offsets))!r}, which are no two positions"
        assert said(a=entry(offsets=offsets)) == wanted
    assert said(a=entry("F4", [3], [0, 1])) == "tensor a, F4 [3], needs 1.5 bytes, but data_offsets span 1"
    assert said(a=entry(offsets=[0, 7])) == "tensor a, F32 [2], needs 8 bytes, but data_offsets span 7"
    huge = [2**63 - 1]
    assert said(a=entry("U8", huge)) == f"tensor a, U8 {huge}, needs 9.22337e+18 bytes, but data_offsets span 8"
    assert said(a=entry("U8", [0], [1, 1]), b=entry()) == "tensor a overlaps b"
    assert said(a=entry(offsets=[1, 9]), data=9) == "1 bytes before tensor a belong to no tensor"
    assert said(a=entry(), b=entry(offsets=[10, 18]), data=18) == "2 bytes before tensor b belong to no tensor"
    short = raw_file({"a": entry(), "b": entry(offsets=[8, 16])}, bytes(15))
    assert refused(path, short) == (
        f"tensor b ends at byte {len(short) + 1}, but the file has {len(short)}: it is truncated; fetch it again"
    )
    assert said(a=entry(), data=9) == "1 bytes after the last tensor belong to no tensor"
    assert said(__metadata__=["format"]) == "__metadata__ must map names to texts"


def test_entries_in_another_order_than_their_data(tmp_path: Path) -> None:
    """Empty tensors come before what begins at their place; of several, by name."""
    path = tmp_path / "a.safetensors"
    empty = entry("U8", [0], [8, 8])
    given = {"z": entry(offsets=[8, 16]), "y": empty, "x": empty, "w": entry()}
    path.write_bytes(raw_file(given | {"__metadata__": {"k": "v"}}, bytes(16)))
    header = read_header(path)
    assert list(header.tensors) == ["w", "x", "y", "z"]
    assert (header.metadata, header.file_size, header.modified) == (
        {"k": "v"}, path.stat().st_size, path.stat().st_mtime_ns
    )  # fmt: skip
    text = path.read_bytes()[8:-16]
    assert header.digest == hashlib.sha256(text).hexdigest()
    at = 8 + len(text)
    assert [(info.start - at, info.stop - at) for info in header.tensors.values()] == [(0, 8), (8, 8), (8, 8), (8, 16)]


def test_the_bits_of_every_dtype() -> None:
    bits = {
        4: ["F4"], 6: ["F6_E2M3", "F6_E3M2"], 8: ["BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8"],
        16: ["BF16", "F16", "I16", "U16"], 32: ["F32", "I32", "U32"], 64: ["C64", "F64", "I64", "U64"],
    }  # fmt: skip
    assert {size: sorted(name for name, own in DTYPE_BITS.items() if own == size) for size in bits} == bits
    assert len(DTYPE_BITS) == sum(map(len, bits.values()))
    assert [tensor_bytes("F6_E2M3", (4,)), tensor_bytes("F32", ()), tensor_bytes("I64", (2, 0))] == [3, 4, 0]


@pytest.mark.parametrize(("name", "padding"), [("a", 7), ("ab", 6), ("abcdefgh", 0), ("é", 6)])
def test_the_bytes_of_a_header(name: str, padding: int) -> None:
    """Without spaces but at the end, text as it is, and metadata only where there is any."""
    text = f'{{"{name}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}},"z":'.encode()
    text += b'{"dtype":"F32","shape":[],"data_offsets":[2,6]}}'
    wanted = text + b" " * (-len(text) % 8)
    found = encode_header([(name, "U8", (2,)), ("z", "F32", ())], {})
    assert found == struct.pack("<Q", len(wanted)) + wanted
    assert len(wanted) - len(text) == padding


def test_metadata_comes_first() -> None:
    assert encode_header([], {"format": "pt"})[8:].rstrip() == b'{"__metadata__":{"format":"pt"}}'
    assert encode_header([], {}) == struct.pack("<Q", 8) + b"{}      "


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    assert [encodable(text) for text in ("", "né\U0001f600", "\ud83d", "a\udc00b")] == [True, True, False, False]
