"""The block formats, and how they are found by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from halfbyte import FORMATS, UnknownNameError, UnsupportedError, get_format
from halfbyte.formats import E2M1, E4M3, E8M0, BlockFormat, ElementFormat

# element, scale, block, global scale, codes per byte, bits per weight
FACTS = {
    "nvfp4": (E2M1, E4M3, 16, True, 2, 4.5),
    "mxfp4": (E2M1, E8M0, 32, False, 2, 4.25),
    "mxfp8": (E4M3, E8M0, 32, False, 1, 8.25),
}

BITS = {("nvfp4", 16): 4.5, ("nvfp4", 32): 4.25, ("mxfp4", 16): 4.5, ("mxfp4", 32): 4.25, ("mxfp8", 32): 8.25}


def test_every_format_is_tested() -> None:
    assert set(FACTS) == set(FORMATS)
    assert {(name, block) for name, format in FORMATS.items() for block in format.blocks} == set(BITS)


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    f = get_format(name)
    assert f.name == name
    assert (f.element, f.scale, f.block, f.has_global, f.codes_per_byte, f.bits_per_element) == FACTS[name]


@pytest.mark.parametrize(("name", "block"), BITS)
def test_block_lengths(name: str, block: int) -> None:
    f = get_format(name, block)
    assert (f.block, f.bits_per_element) == (block, BITS[name, block])
    assert f.name == name
    assert (f == FORMATS[name]) == (block == FORMATS[name].block)


def test_own_block_length_gives_the_literal_itself() -> None:
    assert get_format("nvfp4", 16) is FORMATS["nvfp4"]
    assert get_format("mxfp4") is FORMATS["mxfp4"]


def test_a_format_passes_through() -> None:
    assert get_format(FORMATS["mxfp4"]) is FORMATS["mxfp4"]
    assert get_format(get_format("mxfp4", 16)).block == 16
    assert get_format(FORMATS["mxfp4"], 16).block == 16


@pytest.mark.parametrize("name", ["nvfp5", "", "NVFP4", "mx", None])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown format .*; known: mxfp4, mxfp8, nvfp4$"):
        get_format(name)


@pytest.mark.parametrize(
    ("name", "block", "rule"),
    [
        ("nvfp4", 8, "nvfp4 has blocks of 16 or 32, not 8"),
        ("mxfp4", 64, "mxfp4 has blocks of 16 or 32, not 64"),
        ("mxfp8", 16, "mxfp8 has blocks of 32, not 16"),
        ("nvfp4", 0, "nvfp4 has blocks of 16 or 32, not 0"),
        ("nvfp4", -16, "nvfp4 has blocks of 16 or 32, not -16"),
    ],
)
def test_block_not_offered(name: str, block: int, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{rule}$"):
        get_format(name, block)


def test_formats_are_frozen() -> None:
    with pytest.raises(AttributeError):
        FORMATS["nvfp4"].block = 32  # type: ignore[misc]
    assert isinstance(hash(FORMATS["nvfp4"]), int)


def test_table_is_keyed_by_name() -> None:
    assert all(isinstance(format, BlockFormat) and key == format.name for key, format in FORMATS.items())


NINE_BITS = ElementFormat(name="e5m3", exponent_bits=5, mantissa_bits=3, bias=15)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"element": ElementFormat(name="e1m0", exponent_bits=1, mantissa_bits=0, bias=0)}, "of 2 bits do not pack"),
        ({"element": ElementFormat(name="e2m0", exponent_bits=2, mantissa_bits=0, bias=1)}, "of 3 bits do not pack"),
        ({"element": NINE_BITS}, "of 9 bits do not pack"),
        ({"scale": NINE_BITS}, "a scale of 9 bits does not fit into a byte"),
        ({"block": 15}, "blocks of 15 elements do not end at a byte; take a positive multiple of 2"),
        ({"block": 0}, "blocks of 0 elements"),
        ({"block": -16}, "blocks of -16 elements"),
    ],
)
def test_what_does_not_pack_is_refused_when_it_is_made(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dataclasses.replace(get_format("nvfp4"), **changed)


def test_six_bits_take_a_byte() -> None:
    e3m2 = ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3)
    mxfp6 = dataclasses.replace(get_format("mxfp4"), element=e3m2)
    assert (mxfp6.codes_per_byte, mxfp6.bits_per_element) == (1, 8.25)
