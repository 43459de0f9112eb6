"""Whole calls for a card, against a driver that writes launches down: what is launched, and what goes the general way.

The tensors are on the CPU, where nothing is computed: the bits are tested on a card and by the interpreter.
"""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import device_calls
from halfbyte.backends.gpu import calls as gpu_calls
from halfbyte.backends.gpu import operand
from halfbyte.backends.gpu.driver import cuda, run
from halfbyte.backends.gpu.driver.commands import Image
from halfbyte.backends.gpu.driver.triton_kernels import TritonKernel
from halfbyte.device_calls import Decoder, Quantizer
from halfbyte.request import resolve, resolve_decoding
from tests.backends.gpu.driver.fake import FakeDriver

CPU = torch.device("cpu")
STREAM = 0x77


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(built: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    def image(kernel: TritonKernel, architecture: str) -> Image:
        return Image(b"code", kernel.name, 32 * kernel.warps, 0, len(kernel.letters) + 2)

    monkeypatch.setattr(TritonKernel, "image", image)
    monkeypatch.setattr(operand, "capability_of", lambda index: (9, 0))
    monkeypatch.setattr(run, "capability_of", lambda index: (9, 0))
    monkeypatch.setattr(gpu_calls, "stream_of", lambda: lambda index: STREAM)
    yield built.use(monkeypatch)
    for kept in (cuda.entries, cuda.context_of, cuda.shared_memory_of):
        kept.cache_clear()


def quantizer(dtype: str = "bf16", format: str = "nvfp4", **options: Any) -> Quantizer:
    return Quantizer(resolve(format, dtype=dtype, device="cuda", **options), CPU, ())


def test_a_call_launches_three_kernels_on_its_own_tensors(driver: FakeDriver) -> None:
    x = torch.zeros(4, 6, 256, dtype=torch.bfloat16)
    q = quantizer()(x, None, None)
    assert q is not None
    assert (q.shape, tuple(q.codes.shape), tuple(q.scales.shape)) == ((4, 6, 256), (4, 6, 128), (4, 6, 16))
    assert isinstance(q.global_scale, torch.Tensor)
    assert isinstance(q.stored_scale, torch.Tensor)
    assert isinstance(q.codes, torch.Tensor)
    assert isinstance(q.scales, torch.Tensor)
    amax, numbers, blocks = driver.launches
    assert {made.stream for made in driver.launches} == {STREAM}
    small = q.stored_scale.data_ptr() - 64
    assert (q.global_scale.data_ptr(), q.global_scale.shape) == (small + 68, ())
    assert (amax.words[0], amax.words[1]) == (x.data_ptr(), small + 72)
    assert list(numbers.words[:8]) == [small + 72, small, small + 64, small + 68, 1, 1, 1, 0]
    assert list(blocks.words[:4]) == [x.data_ptr(), q.codes.data_ptr(), q.scales.data_ptr(), small]
    assert list(blocks.words[4:8]) == [384, 16, 32, 384]  # blocks, columns, row distance in 16 bytes, blocks per group
    assert list(blocks.grid) == [3, 1, 1]


def test_large_tensors_have_many_partial_amaxes(driver: FakeDriver) -> None:
    x = torch.zeros(64, 8192, dtype=torch.float32)
    q = quantizer("fp32")(x, None, None)
    assert q is not None
    assert isinstance(q.stored_scale, torch.Tensor)
    amax, numbers, _ = driver.launches
    assert list(amax.grid) == [128, 1, 1]
    assert list(amax.words[2:7]) == [131072, 131072, 1, 128, 128]  # quads, distance, spans, chunks, programs
    assert numbers.words[5] == 128
    assert q.stored_scale.untyped_storage().nbytes() == 4 * (16 + 2 + 128)


@pytest.mark.parametrize("amax", [0.0, -0.0, 7.25, 1e-40, 3.4e38])
def test_a_number_for_the_amax_goes_along_with_the_launch(driver: FakeDriver, amax: float) -> None:
    """No amax kernel, and nothing to fill."""
    assert quantizer()(torch.zeros(4, 64, dtype=torch.bfloat16), amax, None) is not None
    numbers, _ = driver.launches
    assert numbers.words[7] == struct.unpack("<I", struct.pack("<f", abs(amax)))[0]
    assert numbers.words[7] == int(np.float32(abs(amax)).view(np.uint32))


def test_a_tensor_for_the_amax_is_read_where_it_is(driver: FakeDriver) -> None:
    x, amax = torch.zeros(4, 64, dtype=torch.bfloat16), torch.ones(1)
    assert quantizer()(x, amax, None) is not None
    assert quantizer(scaling="row")(x, torch.ones(4), None) is not None
    first, _, second, _ = driver.launches
    assert first.words[0] == amax.data_ptr()
    assert second.words[4] == 4


def test_outputs_that_are_given_are_written_into(driver: FakeDriver) -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    out = quantizer()(x, None, None)
    assert out is not None
    assert isinstance(out.codes, torch.Tensor)
    q = quantizer()(x, None, out)
    assert q is not None
    assert q.codes is out.codes
    assert q.scales is out.scales
    assert driver.launches[-1].words[1] == out.codes.data_ptr()


def general(made: Quantizer, x: torch.Tensor, amax: object = None, out: hb.QuantizedTensor | None = None) -> bool:
    return made(x, amax, out) is None


def test_what_goes_the_general_way(driver: FakeDriver) -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert general(quantizer(), torch.zeros(4, 80, dtype=torch.bfloat16)[:, :64])
    assert general(quantizer(), torch.zeros(300, dtype=torch.bfloat16)[1:257].view(4, 64))
    assert general(quantizer(contract="fouroversix"), torch.zeros(4, 60, dtype=torch.bfloat16))
    assert general(quantizer(contract=hb.contracts.transformer_engine(columnwise=True)), x)
    assert general(quantizer(tile=(16, 16)), torch.zeros(16, 64, dtype=torch.bfloat16))
    assert general(quantizer(), torch.zeros(0, 64, dtype=torch.bfloat16))
    for amax in (-1.0, float("nan"), float("inf"), 1e39, 5, np.float32(1), torch.ones(1).double(), torch.ones(2)):
        assert general(quantizer(), x, amax), amax
    assert general(quantizer(format="mxfp4"), x, 1.0)
    out = quantizer()(x, None, None)
    assert out is not None
    made = len(driver.launches)
    codes, scales = torch.as_tensor(out.codes), torch.as_tensor(out.scales)
    inside = x.view(torch.uint8).view(-1)[:128].view(4, 32)
    shifted = torch.zeros(145, dtype=torch.uint8)[1:129].view(4, 32)
    for wrong_codes, wrong_scales in (
        (inside, scales), (shifted, scales), (codes, inside.reshape(-1)[:16].view(4, 4)),
        (codes, codes.view(-1)[:16].view(4, 4)), (torch.zeros(4, 64, dtype=torch.uint8)[:, ::2], scales),
    ):  # fmt: skip
        wrong = hb.QuantizedTensor(out.format, out.shape, wrong_codes, wrong_scales, None, None, out.contract)
        assert general(quantizer(), x, None, wrong)
    assert len(driver.launches) == made


def test_shapes_that_are_refused(driver: FakeDriver) -> None:
    for shape in ((), (4, 0), (4, 24)):
        with pytest.raises(hb.InputError):
            quantizer(contract="torchao")(torch.zeros(shape, dtype=torch.bfloat16), None, None)


def test_mx_needs_one_launch_and_no_tensor_numbers(driver: FakeDriver) -> None:
    q = quantizer(format="mxfp4")(torch.zeros(4, 64, dtype=torch.bfloat16), None, None)
    assert q is not None
    assert (q.global_scale, q.stored_scale, len(driver.launches)) == (None, None, 1)


def test_decoding_is_one_launch(driver: FakeDriver) -> None:
    q = hb.quantize(torch.randn(4, 64), "nvfp4")
    decoder = Decoder(resolve_decoding(q.format, q.contract, q.method, None, "cuda"), "bf16", CPU, ())
    decoder.index = -1  # what get_device() says of tensors on the CPU
    values = decoder(q, None)
    assert values is not None
    assert (values.shape, values.dtype) == ((4, 64), torch.bfloat16)
    (made,) = driver.launches
    assert isinstance(q.codes, torch.Tensor)
    assert isinstance(q.stored_scale, torch.Tensor)
    assert (made.words[0], made.words[2], made.words[4]) == (
        q.codes.data_ptr(), q.stored_scale.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    assert list(made.words[5:9]) == [16, 4, 8, 16]


def test_shapes_and_calls_are_kept_within_bounds(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_calls, "MOST_SHAPES", 3)
    made = quantizer()
    for rows in range(1, 8):
        made(torch.zeros(rows, 16, dtype=torch.bfloat16), None, None)
    assert len(made.shapes) <= 3
    table: dict[Any, Any] = {}
    monkeypatch.setattr(device_calls, "MOST_KEPT", 2)
    for at in range(5):
        device_calls._keep(table, at, at)
    assert len(table) <= 2


def test_a_method_with_arrays_is_not_kept_alive(driver: FakeDriver) -> None:
    """Its programs hold copies of the arrays for the device; they go with the method."""
    from halfbyte.backends.gpu import programs
    from halfbyte.backends.gpu.choose import ChosenKernel, choose
    from halfbyte.backends.gpu.launch import Matrix

    method = hb.Optimal(np.ones(64, np.float32))
    request = resolve("nvfp4", method=method, dtype="bf16", device="cuda")
    kernel = choose(request)
    assert isinstance(kernel, ChosenKernel)
    before = len(programs._PROGRAMS_OF_METHODS)
    made = programs.quantization_for(kernel, request, Matrix(4, 64, 8, True), 4, False, "own", CPU)
    program, alive = weakref.ref(made.program), weakref.ref(method)
    again = programs.quantization_for(kernel, request, Matrix(4, 64, 8, True), 4, False, "own", CPU)
    assert again is made
    assert len(programs._PROGRAMS_OF_METHODS) == before + 1
    del made, again, method, request
    gc.collect()
    assert (program(), alive()) == (None, None)
    assert len(programs._PROGRAMS_OF_METHODS) == before


def test_threads_that_bind_a_program_at_once_get_the_same_words(driver: FakeDriver) -> None:
    """Who comes second must not replace the words whose address the first one has."""
    from halfbyte.backends.gpu.driver.run import bind

    program = quantizer().calls.bound(4, 64, "own").program
    first = bind(program, 0)
    found = program.words

    class Late(dict):  # type: ignore[type-arg]
        """Another thread finishes after this one has looked."""

        def get(self, key: object, default: object = None) -> None:
            return None

    object.__setattr__(program, "words", Late(found))
    assert bind(program, 0) is first
