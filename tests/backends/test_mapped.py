"""Windows into files: the file's bytes and their amax; what cannot be read is noticed and kills nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.backends.amax import largest_magnitude
from halfbyte.backends.mapped import Window, can_map
from halfbyte.testing import assert_same_bits

pytestmark = pytest.mark.skipif(not can_map(), reason="no windows on this machine")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[int]:
    """A file of 100 000 bytes."""
    (tmp_path / "file").write_bytes(bytes(range(250)) * 400)
    file = os.open(tmp_path / "file", os.O_RDWR)
    yield file
    os.close(file)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("special", [0.0, np.inf, np.nan])
def test_bytes_and_amax(tmp_path: Path, dtype: npt.DTypeLike, special: float) -> None:
    values = (np.random.default_rng(0).standard_normal(40_000) * 3).astype(np.float32)
    values[-1] = special
    wanted = values.astype(dtype)
    (tmp_path / "file").write_bytes(b"z" * 8200 + wanted.tobytes() + b"z" * 9)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    window = Window(file, 8200, wanted.nbytes, wanted.dtype)
    os.close(file)  # a window needs no open file
    assert_same_bits(window.bytes.view(dtype), wanted)
    assert_same_bits(np.array([window.amax]), np.array([largest_magnitude(wanted)]))
    assert window.close()


def test_a_window_is_not_written_to(opened: int) -> None:
    window = Window(opened, 0, 100)
    assert window.amax is None
    with pytest.raises(ValueError, match="read-only"):
        window.bytes[0] = 1
    assert window.close()


def test_a_file_that_is_shorter(opened: int) -> None:
    with pytest.raises(EOFError):
        Window(opened, 99_000, 1001)
    assert Window(opened, 99_000, 1000).close()


def test_a_file_that_cannot_be_mapped(opened: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Window(1 << 20, 0, 10)


def test_a_file_that_is_cut_while_it_is_mapped(opened: int) -> None:
    """Zeros stand for the pages that are gone, and other windows are not touched."""
    cut, other = Window(opened, 10, 99_000), Window(opened, 0, 4096)
    os.ftruncate(opened, 50_000)
    assert cut.bytes[0] == 10
    assert not cut.bytes[-30_000:].any()
    assert other.bytes[249] == 249
    assert not cut.close()
    assert other.close()
    again = Window(opened, 0, 50_000)
    assert again.close()


@pytest.mark.parametrize("handler", ["", "import faulthandler; faulthandler.enable()\n"])
def test_a_bus_error_elsewhere_ends_the_process(tmp_path: Path, handler: str) -> None:
    program = (
        handler + "import mmap, os, sys\nfrom halfbyte.backends.mapped import Window\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\nos.ftruncate(file, 8192)\n"
        "window = Window(file, 0, 100)\nours = mmap.mmap(file, 8192)\nos.ftruncate(file, 0)\n"
        "print(window.bytes[0], flush=True)\nours[5000]\nprint('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "f")], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "0\n"
    assert ("Bus error" in done.stderr) == bool(handler)
