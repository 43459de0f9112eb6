"""The table of kernels against the kernels themselves, and images against what the launcher expects."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import triton
from triton.runtime.jit import JITFunction

from halfbyte.backends.gpu.constants import LISTED
from halfbyte.backends.gpu.driver import triton_kernels
from halfbyte.backends.gpu.driver.triton_kernels import ARGUMENTS, TYPES, TritonKernel, parameters, triton_kernel
from halfbyte.errors import BackendError
from tests.backends.gpu.compiled.builds import BUILDS, Build
from tests.backends.gpu.compiled.search_builds import BUILDS as SEARCH_BUILDS

EVERY = BUILDS | SEARCH_BUILDS


def name_of(build: Build) -> str:
    return f"{build.kernel.fn.__module__.rpartition('.')[2]}.{build.kernel.fn.__name__}"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_table_has_every_argument(name: str) -> None:
    """Pointers end in _ptr and come first; all other arguments that are no constants are numbers, not specialised."""
    function = triton_kernel(name, {}, 4).function()
    assert isinstance(function, JITFunction)
    given = [parameter for parameter in function.params if not parameter.is_constexpr]
    letters = ARGUMENTS[name].replace(" ", "")
    assert [parameter.name.endswith("_ptr") for parameter in given] == [letter != "n" for letter in letters]
    assert all(parameter.do_not_specialize for parameter in given if not parameter.name.endswith("_ptr"))


def test_every_kernel_that_is_built_is_in_the_table() -> None:
    assert {name_of(build) for build in EVERY.values()} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_types_are_those_of_the_builds(name: str) -> None:
    """The builds of the tests were compared with the reference's bits: both must read memory as the same types."""
    from tests.backends.gpu.compiled.builds import POINTERS

    for build in EVERY.values():
        if name_of(build) != name:
            continue
        letters = TritonKernel(name, tuple(build.constants.items()), build.warps).letters
        pointers = [argument for argument in build.kernel.arg_names if argument.endswith("_ptr")]
        expected = [build.types.get(pointer, POINTERS.get(pointer, "*fp32")) for pointer in pointers]
        assert [TYPES[letter] for letter in letters if letter != "n"] == expected


@pytest.mark.parametrize(
    "title", ["amax", "tensor-level numbers of parts", "nvfp4", "mxfp4", "dequantize", "transform"]
)
def test_an_image_has_a_word_for_every_argument(title: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled for Hopper, and found on disk afterwards without compiling."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    build = EVERY[title]
    kernel = triton_kernel(name_of(build), build.constants, build.warps)
    assert not kernel.is_cached("sm_90")
    image = kernel.image("sm_90")
    assert kernel.is_cached("sm_90")
    assert not kernel.is_cached("sm_100")
    assert image.code[:4] == b"\x7fELF"
    assert image.name == build.kernel.fn.__name__
    assert (image.threads, image.words >= len(kernel.letters)) == (32 * build.warps, True)
    monkeypatch.setattr(triton, "compile", lambda *_, **__: pytest.fail("it was compiled again"))
    assert kernel.image("sm_90") == image


def test_what_an_image_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Constants, warps, architecture, sources and Triton's version."""
    build = EVERY["amax"]
    kernel = triton_kernel(name_of(build), build.constants, build.warps)
    seen = [kernel._parts("sm_90"), kernel._parts("sm_100")]
    seen.append(triton_kernel(name_of(build), {**build.constants, "DTYPE": 2}, build.warps)._parts("sm_90"))
    seen.append(triton_kernel(name_of(build), build.constants, 4)._parts("sm_90"))
    monkeypatch.setattr(triton_kernels, "triton_version", lambda: "0")
    seen.append(kernel._parts("sm_90"))
    shutil.copytree(triton_kernels.GPU / "triton", tmp_path / "triton")
    shutil.copy(triton_kernels.GPU / "constants.py", tmp_path)
    changed = tmp_path / "triton" / "plain.py"
    changed.write_text(changed.read_text() + "# changed\n")
    monkeypatch.setattr(triton_kernels, "GPU", tmp_path)
    triton_kernels.sources.cache_clear()
    seen.append(kernel._parts("sm_90"))
    triton_kernels.sources.cache_clear()
    assert len({repr(parts) for parts in seen}) == len(seen)


def test_listed_tensors_and_halves_change_the_first_argument() -> None:
    assert triton_kernel("plain.quantize_nvfp4", {"MAP": LISTED}, 4).letters[0] == "l"
    assert triton_kernel("plain.quantize_nvfp4", {"MAP": 0}, 4).letters[0] == "w"
    assert triton_kernel("hadamard.rotate", {"DTYPE": 0}, 4).letters[0] == "s"


def test_parameters_of_other_sizes_are_refused() -> None:
    assert (
        parameters(".visible .entry f(\n .param .u64 .ptr .global .align 1 a,\n .param .u64 b\n)\n{ .param .b32 }") == 2
    )
    with pytest.raises(BackendError, match="not of eight bytes: u64, u32"):
        parameters(".visible .entry f(\n .param .u64 a,\n .param .u32 b\n)")
