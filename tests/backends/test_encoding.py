"""One call from a file or memory to codes and scale bytes in a file writes and hashes what the usual ones give."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.backends.encoding import Encoder, EncodingResult, EncodingSource, EncodingTarget, Ended, encoder_of
from halfbyte.codec.bits import dtype_name
from halfbyte.request import resolve, stores_scale
from halfbyte.testing import assert_same_bits
from tests.backends.cases import DTYPES, served_cases

LEAF = 1024
BF16 = np.dtype(ml_dtypes.bfloat16)
COLUMNS = 96
CASES = [
    ("nvfp4", "modelopt", "amax"),
    ("nvfp4", "modelopt", "optimal"),
    ("nvfp4", "transformer_engine", "four_six"),
    ("nvfp4", "qwantize", None),
    ("mxfp4", "ocp", "amax"),
    ("mxfp4", "ocp", "optimal"),
    ("mxfp8", "ocp", "amax"),
]


def made(rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.random.default_rng(rows).standard_normal((rows, COLUMNS)).astype(np.float32).astype(dtype)


def encoder(format: str, contract: str, method: str | None, dtype: np.dtype[Any]) -> Encoder:
    found = encoder_of(resolve(hb.get_format(format), contract, method, dtype=dtype_name(dtype), threads=1), LEAF)
    if found is None:
        pytest.skip("the compiled kernels are not installed, or this machine has no SHA instructions")
    return found


def encode(
    used: Encoder, x: npt.NDArray[Any], amax: float | None, folder: Path, from_file: bool, cut: int = 0
) -> tuple[EncodingResult, bytes, bytes]:
    """What a call did, and the codes and scale bytes that it wrote between other bytes."""
    sizes = [x.shape[0] * used.width(role, COLUMNS) for role in ("codes", "scales")]
    places = EncodingTarget(7, sizes[0]), EncodingTarget(7 + sizes[0] + 5, sizes[1])
    raw = b"abc" + x.tobytes()
    (folder / "source").write_bytes(raw[: len(raw) - cut])
    source, target = os.open(folder / "source", os.O_RDONLY), os.open(folder / "target", os.O_RDWR | os.O_CREAT)
    given = EncodingSource(x.nbytes, file=source, offset=3) if from_file else EncodingSource(x.nbytes, x)
    try:
        result = used.encode(given, amax, target, *places, np.empty(used.room, np.uint8))
    finally:
        os.close(source)
        os.close(target)
    written = (folder / "target").read_bytes()
    if result.ended == Ended.ENCODED:
        assert len(written) == places[1].place + sizes[1]
        assert written[:7] == bytes(7)
        assert written[7 + sizes[0] :][:5] == bytes(5)
    return result, written[7:][: sizes[0]], written[places[1].place :]


@pytest.mark.parametrize("from_file", [True, False])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
@pytest.mark.parametrize(("format", "contract", "method"), CASES)
def test_bytes_and_hashes(
    tmp_path: Path, format: str, contract: str, method: str | None, dtype: np.dtype[Any], from_file: bool
) -> None:
    used = encoder(format, contract, method, dtype)
    for rows in (1, 683, 3001):  # a part of a leaf; a few leaves and a part; several steps
        x = made(rows, dtype)
        scaled = format == "nvfp4" and contract != "qwantize"
        amax = None if not scaled else float(np.abs(x.astype(np.float32)).max())
        result, codes, scales = encode(used, x, amax, tmp_path, from_file)
        assert result.ended == Ended.ENCODED
        expected = hb.quantize(x, format, contract, method, global_amax=amax, threads=1)
        assert_same_bits(np.frombuffer(codes, np.uint8), expected.codes.reshape(-1))
        assert_same_bits(np.frombuffer(scales, np.uint8), expected.scales.reshape(-1))
        for data, hashed in ((codes, result.codes), (scales, result.scales)):
            whole = len(data) // LEAF
            leaves = [hashlib.sha256(data[at * LEAF :][:LEAF]).digest() for at in range(whole)]
            assert hashed.digests.tobytes() == b"".join(leaves)
            assert hashed.tail.tobytes() == data[whole * LEAF :]
        (tmp_path / "target").unlink()


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_what_only_the_reference_describes_is_left_to_it(tmp_path: Path, special: float) -> None:
    x = made(700, BF16)
    x[650, 3] = special
    used = encoder("mxfp4", "ocp", "amax", BF16)
    assert encode(used, x, None, tmp_path, True)[0].ended == Ended.LEFT_TO_REFERENCE
    used = encoder("nvfp4", "modelopt", "amax", BF16)
    assert encode(used, x, 5.0, tmp_path, False)[0].ended == Ended.LEFT_TO_REFERENCE


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_kernel_writes_nan_or_inf_without_a_word(tmp_path: Path, dtype: str) -> None:
    """Whatever is asked for, without an amax too: what they become is for the reference to say."""
    encoders = 0
    for case in served_cases(dtype):
        used = encoder_of(replace(case.request(dtype), threads=1), LEAF)
        if used is None:
            continue
        encoders += 1
        for special, row in ((np.nan, 39), (-np.inf, 0)):
            x = made(40, DTYPES[dtype])
            x[row, 5] = special
            amax = 5.0 if stores_scale(case.request(dtype).rule) else None
            assert encode(used, x, amax, tmp_path, False)[0].ended == Ended.LEFT_TO_REFERENCE, str(case)
    assert encoders > 20


def test_a_file_that_ends_early_or_cannot_be_read(tmp_path: Path) -> None:
    used, x = encoder("mxfp4", "ocp", "amax", BF16), made(3001, BF16)
    result = encode(used, x, None, tmp_path, True, cut=9)[0]
    assert (result.ended, result.done, result.error) == (Ended.NOT_READ, x.nbytes - 9, 0)
    target = os.open(tmp_path / "target", os.O_WRONLY)
    try:
        source = EncodingSource(x.nbytes, file=target)  # open for writing alone
        parts = EncodingTarget(0, x.size // 2), EncodingTarget(x.size, x.size // 32)
        result = used.encode(source, None, target, *parts, np.empty(used.room, np.uint8))
    finally:
        os.close(target)
    assert (result.ended, result.done, result.error) == (Ended.NOT_READ, 0, errno.EBADF)


def test_a_full_disk() -> None:
    used, x = encoder("mxfp4", "ocp", "amax", BF16), made(3001, BF16)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        parts = EncodingTarget(0, x.size // 2), EncodingTarget(x.size, x.size // 32)
        result = used.encode(EncodingSource(x.nbytes, x), None, full, *parts, np.empty(used.room, np.uint8))
    finally:
        os.close(full)
    assert (result.ended, result.error) == (Ended.NOT_WRITTEN, errno.ENOSPC)
