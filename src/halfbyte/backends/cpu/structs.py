"""The structures that Python and the C++ kernels share. `load_library` compares their sizes; a test compares fields."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt


class Tables(ctypes.Structure):
    """tables.h: Tables."""

    _fields_ = [
        ("lut", ctypes.c_uint8 * 32768),
        ("starts", ctypes.c_uint32 * 257),
        ("written", ctypes.c_uint8 * 256),
        ("zero_below", ctypes.c_uint32),
        ("zero_byte", ctypes.c_uint32),
        ("threshold", ctypes.c_int32 * 8 * 256),
        ("positive_sign", ctypes.c_int32 * 256),
        ("has_positive_sign", ctypes.c_int32),
        ("scale", ctypes.c_float * 256),
        ("first_segment", ctypes.c_int32),
        ("last_segment", ctypes.c_int32),
        ("segment_sign", ctypes.c_int32),
        ("last_bounded", ctypes.c_int32),
        ("segment", ctypes.c_uint8 * 32 * 256),
        ("steps", ctypes.c_uint8 * 24),
    ]


class Rule(ctypes.Structure):
    """tables.h: Rule."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("pre_scale", "divides", "tie", "sign", "wraps", "for_zero_byte")),
        ("statistics", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("smallest", "for_zero", "factor", "largest", "top", "amax")),
        ("constant", ctypes.c_float * 256),
    ]


class SearchTables(ctypes.Structure):
    """kernels.h: SearchTables."""

    _fields_ = [
        ("multiplier", ctypes.c_float * 128),
        ("scale", ctypes.c_float * 128),
        ("divides", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("zero_byte", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("prescale", "unit", "to_scale")),
    ]


class GeneralSearch(ctypes.Structure):
    """searches.h: GeneralSearch."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("block", "dtype", "element", "objective", "divides", "first", "last")),
        *((name, ctypes.c_int32) for name in ("by_block", "zero_byte", "per_row", "start")),
        *((name, ctypes.c_float) for name in ("most_value", "zero_below")),
        *((name, ctypes.c_void_p) for name in ("value", "constant", "prescale", "unit", "numbers", "bounds")),
    ]


class Grid(ctypes.Structure):
    """searches.h: Grid."""

    _fields_ = [
        ("size", ctypes.c_int32),
        ("code_bits", ctypes.c_int32),
        ("value", ctypes.c_float * 256),
        ("code", ctypes.c_uint8 * 256),
        ("place", ctypes.c_uint8 * 256),
    ]


class FeedbackSteps(ctypes.Structure):
    """searches.h: FeedbackSteps."""

    _fields_ = [
        ("width", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("sign", "nan_code", "sweeps", "per_row")),
        *((name, ctypes.c_void_p) for name in ("order", "factor", "shift", "moments", "scale", "most")),
    ]


class SweepTables(ctypes.Structure):
    """searches.h: SweepTables."""

    _fields_ = [
        ("scale", ctypes.c_float * 126),
        ("byte", ctypes.c_uint8 * 128),
        ("ascending", ctypes.c_int32),
        ("regular", ctypes.c_int32),
        ("unit", ctypes.c_float),
    ]


class PeerSearch(ctypes.Structure):
    """searches.h: PeerSearch."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("block", "dtype", "last", "limit")),
        ("value", ctypes.c_float * 256),
        ("h", ctypes.c_void_p),
    ]


class DeviceFunctions(ctypes.Structure):
    """device_reading.cpp: DeviceFunctions."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("copy", "record", "wait")]


class Ring(ctypes.Structure):
    """device_reading.cpp: Ring."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("events", ctypes.c_void_p),
        ("next", ctypes.c_int64),
    ]


class Recipe(ctypes.Structure):
    """recipe.h: Recipe."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("route", "block", "dtype", "factor", "pre_scale", "element", "stored")),
        *((name, ctypes.c_int32) for name in ("multiplier", "tie", "sign", "wraps", "nan_code", "for_zero_byte")),
        *((name, ctypes.c_int32) for name in ("statistics", "first", "error", "metric", "mx_element", "zero_byte")),
        ("worth_tables", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("smallest", "for_zero", "largest", "top", "given")),
        *((name, ctypes.c_void_p) for name in ("tables", "values")),
        *((name, ctypes.c_int64) for name in ("small", "sampled")),
        *((name, ctypes.c_int32) for name in ("headrooms", "small_headrooms")),
        *((name, ctypes.c_double * 4) for name in ("headroom", "small_headroom")),
        ("clearly", ctypes.c_int64 * 2),
    ]


class DecodeRecipe(ctypes.Structure):
    """recipe.h: DecodeRecipe."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("decode", "block", "dtype", "negative_zero", "code_bits")),
        ("top", ctypes.c_float),
        ("table", ctypes.c_void_p),
    ]


class Encoding(ctypes.Structure):
    """codes/encoding.cpp: Encoding."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("recipe", "held")),
        *((name, ctypes.c_int64) for name in ("offset", "bytes")),
        *((name, ctypes.c_int32) for name in ("source", "target")),
        *((name, ctypes.c_int64) for name in ("codes_at", "scales_at", "leaf")),
        *((name, ctypes.c_void_p) for name in ("code_digests", "scale_digests", "scratch")),
        ("amax", ctypes.c_float),
        ("isa", ctypes.c_int32),
        ("done", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("tails", ctypes.c_void_p * 2),
    ]


class StoredRows(ctypes.Structure):
    """compare.h: StoredRows."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("block", ctypes.c_int32),
        ("tensor_scale", ctypes.c_float),
        ("values", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    ]


class ScaleJudge(ctypes.Structure):
    """compare.h: ScaleJudge."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("six", "four", "tensor_scale", "clipped", "small")),
        *((name, ctypes.c_float * 2) for name in ("exact", "loose", "tight", "least")),
        *((name, ctypes.c_float * 128) for name in ("low", "high")),
    ]


MOST_HEADROOMS = 8


class Survey(ctypes.Structure):
    """searches.h: Survey."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("count", "one", "two", "decides", "step")),
        *((name, ctypes.c_float) for name in ("bottom", "top")),
        ("shift", ctypes.c_int32 * MOST_HEADROOMS),
        ("search", GeneralSearch * MOST_HEADROOMS),
    ]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "tables": Tables,
    "rule": Rule,
    "search": SearchTables,
    "general": GeneralSearch,
    "grid": Grid,
    "sweep": SweepTables,
    "peer": PeerSearch,
    "feedback": FeedbackSteps,
    "device_functions": DeviceFunctions,
    "ring": Ring,
    "recipe": Recipe,
    "decode_recipe": DecodeRecipe,
    "encoding": Encoding,
    "stored_rows": StoredRows,
    "judge": ScaleJudge,
    "survey": Survey,
}
"""The structures by NAME. The function hb_sizeof_NAME of the library returns the size of a structure."""


def as_array(part: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A ctypes array as a numpy array that shares its memory."""
    return np.frombuffer(part, dtype=dtype)
