"""The card of torch, with a processor in place of the GPU: its bits, and what it asks of CUDA's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.contracts import get_contract
from halfbyte.feedback import prepare
from halfbyte.formats import get_format
from halfbyte.testing import assert_same_bits
from tests.checkpoint.test_calibrated import linear
from tests.checkpoint.toy import random

torch = pytest.importorskip("torch")

Asked = list[tuple[object, ...]]


@pytest.fixture
def engine() -> Engine:
    return Engine(get_format("nvfp4"), get_contract("modelopt", get_format("nvfp4")), "optimal", repairs=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is asked of a GPU with 700 of 1,000 bytes free."""
    found: Asked = []

    def note(name: str) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *given: found.append((name, *map(str, given))))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    for name in ("set_device", "set_per_process_memory_fraction", "empty_cache"):
        note(name)
    return found


def card(engine: Engine, device: str = "cpu") -> Any:
    from halfbyte.checkpoint.execute.device.torch_card import TorchCard

    return TorchCard(device, engine)


@pytest.mark.parametrize(("limit", "share"), [(None, None), (250, "0.25"), (1000, "1.0"), (5000, "1.0")])
def test_a_limit_is_torchs_own_while_the_card_is_used(
    engine: Engine, asked: Asked, limit: int | None, share: str | None
) -> None:
    one = card(engine, "cuda:3")
    assert (one.name, one.free()) == ("cuda:3", 700)
    one.begin(limit)
    one.end()
    limited = [("set_per_process_memory_fraction", share, "cuda:3")] if share else []
    given_back = [("set_per_process_memory_fraction", "1.0", "cuda:3")] if share else []
    assert asked == [("set_device", "cuda:3"), *limited, ("empty_cache",), *given_back]


@pytest.mark.parametrize("cross", [False, True])
def test_the_bits_of_gptq(engine: Engine, cross: bool) -> None:
    known, x = linear(0, 64, cross=cross), random(1, 24, 64, dtype=np.float32)
    factor = prepare(known.second_moment, 16, hb.Gptq(), cross_moment=known.cross_moment)
    codes, scales = card(engine).solve(x, factor, np.float32(7), "m")
    wanted = hb.gptq(x, known.second_moment, "nvfp4", "modelopt", cross_moment=known.cross_moment, global_amax=7.0)
    assert_same_bits(codes, wanted.codes)
    assert_same_bits(scales, wanted.scales)


def test_a_factor_is_made_on_the_card(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[tuple[object, ...], dict[str, object]]] = []
    place = "halfbyte.checkpoint.execute.device.torch_card.prepare"
    monkeypatch.setattr(place, lambda *given, **named: made.append((given, named)))
    known, method = linear(0, 64, cross=True), hb.Gptq(damping=0.02)
    card(engine, "cuda:3").factor(known, 16, method, "stats: of m")
    (((second, block, by), named),) = made
    assert (second is known.second_moment, block, by) == (True, 16, method)
    assert named == {"cross_moment": known.cross_moment, "device": "cuda:3", "name": "stats: of m"}


def test_the_bits_of_an_objective(engine: Engine) -> None:
    x = random(1, 24, 64, dtype=np.float32)
    method = hb.Optimal(np.arange(1, 65, dtype=np.float32))
    codes, scales = card(engine).quantize(x, method, np.float32(7))
    wanted = hb.quantize(x, "nvfp4", "modelopt", method, global_amax=7.0)
    assert_same_bits(codes, wanted.codes)
    assert_same_bits(scales, wanted.scales)


def test_memory_that_ends_is_an_error_without_torchs_frames(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold tensors, and so the memory that whoever tries again needs."""

    def full(*given: object, **named: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    one = card(engine)
    monkeypatch.setattr("halfbyte.checkpoint.execute.device.torch_card.quantize", full)
    with pytest.raises(DeviceMemoryError, match=r"^CUDA out of memory. Tried to allocate 2 GiB$") as caught:
        one.quantize(np.ones((16, 64), np.float32), hb.Optimal(), None)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
