"""Reading a file together with the largest magnitude gives the bytes and the amax that two passes give."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.backends.amax import can_read, is_cached_here, largest_magnitude, read_largest_magnitude
from halfbyte.testing import assert_same_bits

pytestmark = pytest.mark.skipif(not can_read(), reason="the compiled kernels are not installed")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("special", [0.0, np.inf, np.nan])
def test_bytes_and_amax(tmp_path: Path, dtype: npt.DTypeLike, special: float) -> None:
    values = (np.random.default_rng(0).standard_normal(400_000) * 3).astype(np.float32)
    values[-1] = special
    wanted = values.astype(dtype)
    (tmp_path / "file").write_bytes(b"abc" + wanted.tobytes() + b"z" * 9)
    into = np.empty_like(wanted)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        amax, done = read_largest_magnitude(file, 3, into)
    finally:
        os.close(file)
    assert done == wanted.nbytes
    assert_same_bits(into, wanted)
    assert_same_bits(np.array([amax]), np.array([largest_magnitude(wanted)]))


def test_a_file_that_ends_early_or_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.array([1, -7, 2], np.float32).tobytes() + b"\0\0")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    into = np.zeros(5, np.float32)
    amax, done = read_largest_magnitude(file, 0, into)
    assert (float(amax), done) == (7.0, 14)
    os.close(file)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        read_largest_magnitude(file, 0, into)


@pytest.mark.parametrize("place", [0, 99_999, 100_000, 399_999])
def test_bytes_that_nobody_keeps(tmp_path: Path, place: int) -> None:
    values = np.linspace(-1, 1, 400_000).astype(np.float32)
    values[place] = -7
    (tmp_path / "file").write_bytes(values.tobytes())
    file = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        found = read_largest_magnitude(file, 0, np.empty(100_000, np.float32), values.nbytes)
    finally:
        os.close(file)
    assert found == (np.float32(7), values.nbytes)


def test_file_systems_that_cache(tmp_path: Path) -> None:
    for path, cached in ((Path("/dev/shm"), True), (Path("/proc"), False)):
        if path.is_dir():
            file = os.open(path, os.O_RDONLY)
            assert is_cached_here(file) == cached
            os.close(file)
    assert not is_cached_here(-1)
