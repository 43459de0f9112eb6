"""Python and C++ mean the same by a number: enumerations and structures are read from the headers and compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import halfbyte
from halfbyte.backends import compare, encoding, numbering
from halfbyte.backends.cpu import general_search, recipe, tables_mx, tables_nvfp4
from halfbyte.backends.cpu.library import ISAS
from halfbyte.backends.cpu.structs import STRUCTURES

NATIVE = Path(halfbyte.__file__).parent / "backends" / "cpu" / "native"
SOURCES = {path: path.read_text() for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".inc", ".cpp")}


def enumeration(name: str, sources: str = "\n".join(SOURCES.values())) -> dict[str, int]:
    """The names and numbers of a C++ enumeration; each must be written out."""
    body = re.search(rf"enum {name} : int {{(.*?)}};", sources, re.DOTALL)
    assert body is not None, f"there is no enumeration {name}"
    entries = [entry.strip() for entry in body[1].split(",") if entry.strip()]
    return {key: int(number) for key, number in (re.split(r"\s*=\s*", entry) for entry in entries)}


def named(functions: list[object]) -> dict[str, int]:
    return {getattr(function, "__name__").upper(): number for number, function in enumerate(functions)}  # noqa: B009


def listed(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


EXPECTED: dict[str, dict[str, int]] = {
    "Dtype": {name.upper(): number for name, number in numbering.DTYPE_NUMBERS.items()},
    "PreScale": named(numbering.PRE_SCALES),
    "Factor": named(numbering.FACTORS),
    "ElementFormula": named(numbering.ELEMENTS),
    "Stored": named(numbering.STORED),
    "Multiplier": named(numbering.MULTIPLIERS),
    "Decode": named(numbering.DECODES),
    "Route": {kernel.name: number for kernel, number in recipe.ROUTES.items()},
    "Tie": {f"TIE_{name.upper()}": number for number, name in enumerate(numbering.TIES)},
    "Sign": listed(["SIGN_BELOW_ZERO", "SIGN_BIT", "SIGN_NOT_ABOVE_ZERO"]) | {"SIGN_OF_X": tables_nvfp4.SIGN_OF_X},
    "ErrorKind": named(numbering.ERRORS),
    "Measure": listed(["ABSOLUTE", "SQUARED", "LARGEST"]),
    "MxElement": listed(["MX_E2M1", "MX_E2M1_DOWN", "MX_E4M3"]),
    "Element": listed(["EVEN", "DOWN", "WRAPPED", "NEAREST_E4M3", "FIRST_NEAREST"]),
    "ScaleMark": {mark.name or "": mark.value for mark in compare.ScaleMark},
    "Ended": {ended.name: ended.value for ended in encoding.Ended},
    "Objective": listed([name.upper().replace(" ", "_") for name in general_search.OBJECTIVES]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_enumeration_is_what_python_takes_it_for(name: str) -> None:
    assert enumeration(name) == EXPECTED[name]


def test_every_enumeration_is_compared() -> None:
    assert set(re.findall(r"enum (\w+) : int {", "\n".join(SOURCES.values()))) == set(EXPECTED)


def test_python_lists_that_have_other_words() -> None:
    """What C++ calls by other names than Python: the order is written down here, once."""
    assert numbering.SIGNS == ["y < 0", "sign bit", "y <= 0"]
    assert numbering.METRICS == ["mae", "mse", "abs_max"]
    assert list(tables_mx.ELEMENTS) == ["even", "down"]  # E4M3 comes after them
    assert general_search.ELEMENTS == ["even", "down", "wraps", "e4m3", "first nearest"]


def test_a_moved_number_is_noticed() -> None:
    moved = "enum Tie : int { TIE_EVEN = 1, TIE_DOWN = 0 };"
    assert enumeration("Tie", moved) != EXPECTED["Tie"]


def test_instruction_sets_have_the_numbers_of_the_table() -> None:
    text = next(text for path, text in SOURCES.items() if "hb_best_isa" in text and path.suffix == ".cpp")
    chosen = re.search(r"tables_of\(int isa\) {(.*?)^}", text, re.DOTALL | re.MULTILINE)
    assert chosen is not None
    found = {name: int(number) for number, name in re.findall(r"isa == (\d)\) return &hb_(\w+)", chosen[1])}
    assert found == {name: number for name, number in ISAS.items() if number}


# --- structures ---


def members(name: str) -> list[str]:
    """Names of a structure's members in order, as its header declares them."""
    body = re.search(rf"struct {name} {{(.*?)^}};", "\n".join(SOURCES.values()), re.DOTALL | re.MULTILINE)
    assert body is not None, f"there is no structure {name}"
    code = re.sub(r"//[^\n]*", "", body[1])
    found = []
    for declaration in code.split(";"):
        declared = re.match(r"\s*(?:const )?\w+\*?\s+(.*)", declaration, re.DOTALL)
        if declared is None or declaration.strip().startswith("static"):
            continue
        found += [re.match(r"[*\s]*(\w+)", part)[1] for part in declared[1].split(",")]  # type: ignore[index]
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_has_the_members_of_its_header(name: str) -> None:
    structure = STRUCTURES[name]
    assert [field[0] for field in structure._fields_] == members(structure.__name__)
