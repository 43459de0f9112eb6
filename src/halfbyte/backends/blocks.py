"""Casts of whole blocks, by the backend that the caller names."""

from __future__ import annotations

from halfbyte.backends import get_backend
from halfbyte.backends.cpu import repack
from halfbyte.backends.gpu import cast_scales as cast_device_blocks
from halfbyte.backends.reference import repack as reference
from halfbyte.codec.bits import U8
from halfbyte.errors import BackendError, refuse_array

__all__ = ["cast_blocks", "cast_device_blocks", "host_backend"]


def host_backend(name: str) -> str:
    """The backend for arrays on the host: the one named, or "auto" beside one that serves tensors on a device."""
    refuse_array("backend", name)
    return "auto" if name == "auto" or get_backend(name).takes_tensors else name


def cast_blocks(
    codes: U8, scales: U8, table: U8, out: tuple[U8, U8], backend: str = "auto", threads: int | None = None
) -> int:
    """Copy MXFP4 blocks of 32 as pairs of NVFP4 blocks that keep their codes. Returns how many blocks are zero.

    codes: (blocks, 16). scales: (blocks,). table: the E4M3 byte that stands for each E8M0 byte.
    out: contiguous codes (blocks, 16) and scales (blocks, 2) to write into.
    backend: "reference" is numpy, "cpu" is compiled, "auto" is compiled where the package has its kernels.
    """
    chosen = host_backend(backend)
    if chosen == "reference" or (chosen == "auto" and not repack.has_kernels()):
        return reference.cast_blocks(codes, scales, table, out)
    if not repack.has_kernels():
        raise BackendError("backend cpu cannot cast: the package was installed without its kernels; choose 'reference'")
    return repack.cast_blocks(codes, scales, table, out, threads)[2]
