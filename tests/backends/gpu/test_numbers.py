"""The numbers that Python and the kernels share: each side has every name, and CUDA's agree with Python's.

Triton's constants are made from Python's lists (triton/numbers.py), so what can go wrong there is a formula without a
branch. CUDA's are written out in the sources, which are read here.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

import halfbyte.backends.gpu
from halfbyte.backends import numbering
from halfbyte.backends.gpu import constants
from halfbyte.backends.gpu.cuda.table_kernels import CONTRACT, SOURCES, Operand
from halfbyte.codec.bits import FLOAT32_MAX

TRITON = Path(halfbyte.backends.gpu.__file__).parent / "triton"

# --- Triton: a branch for every formula ---

BRANCHES: dict[tuple[str, str], tuple[list[object], tuple[str, ...]]] = {
    ("scales.py", "KIND"): (numbering.FACTORS, ("constant_factor",)),
    ("scales.py", "STORED"): (numbering.STORED, ("not_stored",)),
    ("scales.py", "MULTIPLIER"): (numbering.MULTIPLIERS, ("one_level",)),
    ("scales.py", "PRE"): (numbering.PRE_SCALES, ()),
    ("scales.py", "ELEMENT"): (numbering.ELEMENTS, ()),
    ("decode.py", "DECODE"): (numbering.DECODES, ("decode_by_table", "decode_by_power")),
    ("four_six.py", "KIND"): (numbering.ERRORS, ()),
    ("four_six.py", "METRIC"): (list(numbering.METRICS), ()),
    ("four_six.py", "ORDER"): (numbering.SUMS, ()),
}
"""Where kernels branch on the entries of a list, and which other names they know there."""


def branches(source: str, constant: str) -> set[str]:
    """Names that a constant is compared with, and those that the last branch of such a chain is for."""
    found = set(re.findall(rf"\b{constant} [!=]= ([A-Z_0-9]+)", source))
    chain = rf"if {constant} == (?:(?!if (?!{constant})[A-Z]+ ).)*?\n\s*else:  # ([A-Z_, ]+?)(?:, or ([A-Z_]+))?\n"
    chains = re.findall(chain, source, re.DOTALL)
    for first, second in chains:
        found |= {name for name in (*first.split(", "), second) if name}
    return found


def missing_branches(source: str, constant: str, wanted: set[str]) -> set[str]:
    return wanted ^ branches(source, constant)


def wanted_names(listed: list[object], more: tuple[str, ...]) -> set[str]:
    return {str(getattr(entry, "__name__", entry)).upper() for entry in (*listed, *more)}


@pytest.mark.parametrize(("file", "constant"), BRANCHES)
def test_every_formula_has_a_branch(file: str, constant: str) -> None:
    source = (TRITON / file).read_text()
    wanted = wanted_names(*BRANCHES[file, constant])
    assert missing_branches(source, constant, wanted) == set()
    name = sorted(wanted)[0]
    assert missing_branches(source, constant, wanted - {name}) == {name}, "a branch too many would be seen"
    assert missing_branches(re.sub(rf"\b{name}\b", "OTHER", source), constant, wanted) >= {name}


def test_every_prepared_number_is_written() -> None:
    source = (TRITON / "scales.py").read_text()
    written = set(re.findall(r"tl\.store\(at \+ ([A-Z_]+),", source))
    assert written == {name.upper() for name in constants.PREPARED}
    assert len(constants.PREPARED) <= constants.NUMBERS


# --- CUDA: the same numbers, structs and constants ---


def enumerated(source: str, name: str) -> dict[str, int]:
    """The names and numbers of a C++ enum."""
    found = re.search(rf"enum {name} \{{([^}}]*)\}}", source)
    assert found is not None, f"no enum {name}"
    return {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", found[1])}


def prepared_problem(source: str) -> str | None:
    """What CUDA's numbers of a group and Python's disagree about."""
    for name, number in enumerated(source, "Number").items():
        if name.lower() not in constants.PREPARED or constants.PREPARED.index(name.lower()) != number:
            return f"{name} is {number}"
    count = re.search(r"constexpr int NUMBERS = (\d+);", source)
    return None if count is not None and int(count[1]) == constants.NUMBERS else "NUMBERS"


ENUMS: dict[str, list[object]] = {
    "Kind": numbering.ERRORS,
    "PreScale": numbering.PRE_SCALES,
    "ElementFormula": numbering.ELEMENTS,
    "Dtype": list(numbering.DTYPE_NUMBERS),
    "Tie": list(numbering.TIES),
    "Sign": ["below_zero", "sign_bit", "not_above_zero"],
}
"""C++ enums and the lists whose order they repeat; signs are formulas in Python, which have names here."""


def enum_problem(source: str) -> str | None:
    """What the enums of a source and Python's lists disagree about."""
    for enum in re.findall(r"enum (\w+) \{", source):
        names = [str(getattr(entry, "__name__", entry)).upper() for entry in ENUMS.get(enum, [])]
        if enum in ENUMS and enumerated(source, enum) != {name: number for number, name in enumerate(names)}:
            return f"{enum} is not {names}"
    return None


SIZES = {"i64": ctypes.c_longlong}
"""C++ types of the fields of Operand; all others are pointers."""


def operand_problem(source: str) -> str | None:
    """What the struct Operand and its copy in Python disagree about: names, types and their order."""
    body = re.search(r"struct Operand \{(.*?)\n\};", source, re.DOTALL)
    assert body is not None
    fields: list[tuple[str, object]] = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        names = line.replace("const ", "").replace("unsigned char", "byte").strip()
        if names:
            kind, rest = names.split(maxsplit=1)
            fields += [(name.strip(), SIZES.get(kind, ctypes.c_void_p)) for name in rest.split(",")]
    mine = [(name, kind) for name, kind, *_ in Operand._fields_]
    return None if fields == mine else f"{fields} are not {mine}"


def float32_max_problem(source: str) -> str | None:
    found = re.search(r"FLOAT32_MAX = ([0-9.e]+)f;", source)
    return None if found is not None and float(found[1]) == float(FLOAT32_MAX) else "FLOAT32_MAX"


@pytest.mark.parametrize(
    ("problem", "file", "edit"),
    [
        (prepared_problem, "numbers.cuh", ("UNIT = 9", "UNIT = 8")),
        (prepared_problem, "numbers.cuh", ("NUMBERS = 16", "NUMBERS = 12")),
        (prepared_problem, "numbers.cuh", ("SEARCHED = 10", "SOUGHT = 10")),
        (enum_problem, "four_six.cuh", ("ERROR_BY_AMAX = 0, ERROR_BY_RECIPROCAL = 1", "ERROR_BY_AMAX = 1, X = 0")),
        (enum_problem, "contract.cuh", ("OVER_PRODUCT = 3", "OVER_PRODUCT = 4")),
        (enum_problem, "contract.cuh", ("OVER_SCALE = 8", "OVER_SCALES = 8")),
        (enum_problem, "contract.cuh", ("EVEN = 0, DOWN = 1", "EVEN = 1, DOWN = 0")),
        (enum_problem, "contract.cuh", ("SIGN_BIT = 1", "SIGN_BIT = 2")),
        (enum_problem, "values.cuh", ("FP16 = 1, FP32 = 2", "FP32 = 1, FP16 = 2")),
        (operand_problem, "blocks.cuh", ("i64 groups, group_blocks;", "i64 group_blocks, groups;")),
        (operand_problem, "blocks.cuh", ("i64 blocks, columns, row_quads;", "int blocks, columns, row_quads;")),
        (float32_max_problem, "numbers.cuh", ("FLOAT32_MAX = 3.4", "FLOAT32_MAX = 3.3")),
    ],
)
def test_cuda_agrees_with_python(problem: object, file: str, edit: tuple[str, str]) -> None:
    """And where one side is edited, it is seen."""
    source = (SOURCES / file).read_text()
    assert callable(problem)
    assert problem(source) is None
    assert edit[0] in source
    assert problem(source.replace(*edit)) is not None


def test_an_edited_list_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, four_six = (SOURCES / "numbers.cuh").read_text(), (SOURCES / "four_six.cuh").read_text()
    monkeypatch.setattr(constants, "PREPARED", ("something", *constants.PREPARED))
    assert prepared_problem(numbers) is not None
    monkeypatch.setitem(ENUMS, "Kind", list(reversed(numbering.ERRORS)))
    assert enum_problem(four_six) is not None


def test_the_cpu_build_takes_the_contract_in_order() -> None:
    source = (Path(__file__).parent / "cuda_on_cpu.h").read_text()
    assert tuple(re.findall(r"^    (\w+) = \(\w+\)c\[\d+\];", source, re.MULTILINE)) == CONTRACT


SHORT_DIVISIONS = ("0.0003720237873494625", "0.0006510416278615594", "2.217434742768365e-11", "3.8805108432127255e-11")


@pytest.mark.parametrize("number", SHORT_DIVISIONS)
def test_short_divisions_have_the_same_parts_on_both_sides(number: str) -> None:
    """1/2688 and 1/1536 in two parts; test_arithmetic.py tries them on every significand."""
    assert number in (TRITON / "four_six.py").read_text()
    assert f"{number}f" in (SOURCES / "four_six.cuh").read_text()


@pytest.mark.parametrize("number", ["0.1666666567325592", "9.934107758624577e-09"])
def test_a_sixth_has_the_same_parts_on_both_sides(number: str) -> None:
    assert number in (TRITON / "scales.py").read_text()
    assert f"{number}f" in (SOURCES / "four_six_estimate.cu").read_text()
