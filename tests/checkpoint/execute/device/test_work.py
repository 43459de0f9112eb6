"""Conversion on devices gives the bytes of the CPU, whatever the devices, their memory and their pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute import conversion
from halfbyte.checkpoint.execute.device import lanes
from halfbyte.checkpoint.execute.engine import Engine
from tests.checkpoint.execute.device.fake import FakeDevice
from tests.checkpoint.toy import all_bytes, llama, write_checkpoint

Opened = list[FakeDevice]
CPU = Resources(workers=2, max_memory=1 << 26, sync=False, chunk=3000)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    """Replace the devices of the next runs by fake ones with these bytes of memory. A run fills the list."""

    def install(*memories: int, prepare: Callable[[FakeDevice], None] = lambda device: None) -> Opened:
        opened: Opened = []

        def open_devices(device: str, engine: Engine) -> Opened:
            opened[:] = [FakeDevice(f"cuda:{i}", engine, memory, seed=i) for i, memory in enumerate(memories)]
            for one in opened:
                prepare(one)
            return opened

        monkeypatch.setattr(conversion, "open_devices", open_devices)
        return opened

    monkeypatch.setattr(lanes, "SMALLEST_LANE", 1 << 12)
    return install


def on_cpu(source: Path, options: Options) -> dict[str, bytes]:
    """The files that a conversion on the CPU writes."""
    run(make_plan(source, options), source.parent / "cpu", CPU)
    return all_bytes(source.parent / "cpu")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("to", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("chunk", [500, 3000, 1 << 20])
def test_floats(tmp_path: Path, devices: Callable[..., Opened], dtype: npt.DTypeLike, to: str, chunk: int) -> None:
    source = write_checkpoint(tmp_path / "s", llama(dtype=dtype), shards=3)
    options = Options(to=to, layout="compressed-tensors")
    expected = on_cpu(source, options)
    opened = devices(1 << 26)
    run(make_plan(source, options), tmp_path / "d", replace(CPU, workers=3, chunk=chunk, device="cuda"))
    assert all_bytes(tmp_path / "d") == expected
    assert opened[0].calls["quantize"] >= 14
    assert opened[0].pinned == {}
