"""The kernels built for the capabilities that every run of the tests leaves out. Run by `make test-interpreter`."""

from __future__ import annotations

import pytest

from halfbyte.backends.gpu.cuda.table_kernels import Form
from halfbyte.contracts import Contract
from halfbyte.methods import Method
from tests.backends.gpu.compiled import search_builds, test_compile, test_compile_searches, test_cuda_compile
from tests.backends.gpu.compiled.builds import BUILDS, OTHERS
from tests.backends.gpu.compiled.test_compile_searches import FUSED


@pytest.mark.parametrize("capability", OTHERS)
@pytest.mark.parametrize("name", BUILDS)
def test_builds(name: str, capability: int) -> None:
    test_compile.check(name, capability)


@pytest.mark.parametrize("capability", OTHERS)
@pytest.mark.parametrize("name", search_builds.BUILDS)
def test_searches_build(name: str, capability: int) -> None:
    test_compile_searches.check(search_builds.BUILDS[name], capability, FUSED.get(name, 0))


@pytest.mark.parametrize("capability", OTHERS)
@pytest.mark.parametrize(("method", "form", "contract", "dtype"), test_cuda_compile.BUILDS, ids=str)
def test_cuda_builds(method: Method, form: Form, contract: Contract, dtype: str, capability: int) -> None:
    test_cuda_compile.check(method, form, contract, dtype, capability)
