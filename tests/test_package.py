"""The package finds its public names when they are used: all of them, each the same as where it is defined."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte as hb


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_type_checkers_are_told_the_same_as_the_package() -> None:
    """The names under TYPE_CHECKING, with their modules, are those of HOMES; and both are what __all__ lists."""
    tree = ast.parse(Path(hb.__file__).read_text())
    told = {
        (str(node.module).removeprefix("halfbyte."), alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {(module, name) for module, names in hb.HOMES.items() for name in names}
    modules = {name for module, name in told if module == "halfbyte"}
    assert told == found | {("halfbyte", name) for name in modules}
    later = {"calibration", "checkpoint", "layouts", "online", "statistics", "testing", "verify"}
    assert modules == later | {"contracts", "gpu"}
    assert {name for _, name in found} | {"contracts"} == set(hb.__all__)


@pytest.mark.parametrize("module", hb.HOMES)
def test_a_public_name_is_the_one_of_its_module(module: str) -> None:
    for name in hb.HOMES[module]:
        assert getattr(hb, name) is getattr(importlib.import_module(f"halfbyte.{module}"), name)


def test_every_name_is_listed_before_it_is_loaded() -> None:
    assert run("import halfbyte; print(set(halfbyte.__all__) <= set(dir(halfbyte)), 'cast' in vars(halfbyte))") == (
        "True False"
    )


def test_importing_the_package_loads_none_of_its_modules() -> None:
    code = "import sys, halfbyte; print([name for name in sys.modules if name.startswith(('halfbyte.', 'numpy'))])"
    assert run(code) == "[]"


@pytest.mark.parametrize("first", ["halfbyte.quantize", "halfbyte.casting"])
def test_quantize_is_the_function_whatever_is_imported_first(first: str) -> None:
    if first == "halfbyte.torch_ops":
        pytest.importorskip("torch")
    code = (
        f"import {first}, halfbyte; from halfbyte import quantize; print(type(quantize), quantize is halfbyte.quantize)"
    )
    assert run(code) == "<class 'function'> True"


def test_all_names_at_once() -> None:
    assert run("from halfbyte import *; print(quantize.__name__, contracts.torchao())") == "quantize torchao()"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'halfbyte' has no attribute 'quantise'"):
        hb.quantise  # type: ignore[attr-defined]  # noqa: B018
