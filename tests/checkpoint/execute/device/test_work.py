"""Conversion on devices gives the bytes of the CPU, whatever the devices, their memory and their pace."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.backends.headroom import SMALL
from halfbyte.checkpoint import Event, Options, Outcome, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute import conversion
from halfbyte.checkpoint.execute.device import lanes
from halfbyte.checkpoint.execute.device.protocol import STAGED
from halfbyte.checkpoint.execute.device.sizes import most_lanes, whole_need
from halfbyte.checkpoint.execute.device.work import DeviceWork
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.io.files import Files
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from tests.backends.gpu.card import convert_checks
from tests.checkpoint.execute.device.fake import FakeDevice
from tests.checkpoint.toy import all_bytes, llama, random, write_checkpoint

Opened = list[FakeDevice]
Install = Callable[..., Opened]
CPU = Resources(workers=2, max_memory=1 << 26, sync=False, chunk=3000)
GPU = replace(CPU, workers=3, device="cuda")
COMPRESSED = Options(layout="compressed-tensors")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replace the devices of the next runs by fake ones with these bytes of memory. A run fills the list."""

    def install(*memories: int, prepare: Callable[[FakeDevice], None] = lambda device: None) -> Opened:
        opened: Opened = []

        def open_devices(device: str, plan: Plan, engine: Engine) -> Opened:
            if device == "cpu":
                return []
            opened[:] = [FakeDevice(f"cuda:{i}", engine, memory, seed=i) for i, memory in enumerate(memories)]
            for one in opened:
                one.pinned = opened[0].pinned  # what is pinned is pinned for every device
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


def check(source: Path, options: Options, resources: Resources = GPU) -> Outcome:
    """Convert on the CPU and on the devices, and compare every file."""
    expected = on_cpu(source, options)
    outcome = run(make_plan(source, options), source.parent / "gpu", resources)
    assert all_bytes(source.parent / "gpu") == expected
    return outcome


# --- the same bytes ---


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("to", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("chunk", [500, 3000, 1 << 20])
def test_floats(tmp_path: Path, devices: Install, dtype: npt.DTypeLike, to: str, chunk: int) -> None:
    source = write_checkpoint(tmp_path / "s", llama(dtype=dtype), shards=3)
    opened = devices(1 << 26)
    check(source, replace(COMPRESSED, to=to), replace(GPU, chunk=chunk))
    assert opened[0].calls["quantize"] >= 14
    assert (opened[0].calls.get("survey", 0) >= 14) == (to == "nvfp4")
    assert opened[0].pinned == {}
    assert opened[0].used == 0


@pytest.mark.parametrize("kind", convert_checks.SOURCES)
@pytest.mark.parametrize(("to", "layout"), [("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")])
@pytest.mark.parametrize("memory", [1 << 18, 1 << 26])
def test_every_kind_of_source(
    tmp_path: Path, devices: Install, monkeypatch: pytest.MonkeyPatch, kind: str, to: str, layout: str, memory: int
) -> None:
    """In pieces that a lane can just hold, and whole."""
    pytest.importorskip("torch")
    shapes = {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (256, 256)}
    monkeypatch.setattr(convert_checks, "SHAPES", shapes)
    make, config = convert_checks.SOURCES[kind]
    convert_checks.write(tmp_path / "s", make(), config)
    opened = devices(1 << 26)
    workers = 1 if memory == 1 << 18 else 2
    resources = replace(GPU, chunk=1 << 14, max_gpu_memory=memory, workers=workers)
    check(tmp_path / "s", Options(to=to, layout=layout, method="amax" if to == "nvfp4" else None), resources)
    assert bool(opened[0].calls) == (kind != to)
    if kind not in (to, "bf16", "fp16", "fp32"):
        assert opened[0].calls["decode"] >= 3


def stacked(layers: int = 2) -> tuple[dict[str, npt.NDArray[Any]], dict[str, object]]:
    """gpt-oss's experts in BF16: three-dimensional, transposed, gate and up interleaved."""
    tensors = {}
    for layer in range(layers):
        at = f"model.layers.{layer}.mlp.experts"
        tensors[f"{at}.gate_up_proj"] = random(layer, 4, 64, 128)
        tensors[f"{at}.down_proj"] = random(10 + layer, 4, 64, 64)
    return tensors, {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64}


@pytest.mark.parametrize("chunk", [700, 1 << 20])
@pytest.mark.parametrize(("to", "layout"), [("mxfp4", "gpt-oss"), ("nvfp4", "modelopt")])
def test_stacked_and_transposed(tmp_path: Path, devices: Install, chunk: int, to: str, layout: str) -> None:
    tensors, config = stacked()
    opened = devices(1 << 26, 1 << 26)
    check(write_checkpoint(tmp_path / "s", tensors, config), Options(to=to, layout=layout), replace(GPU, chunk=chunk))
    assert all(device.calls["quantize"] for device in opened)


def test_what_only_moves_bytes_stays_on_the_cpu(tmp_path: Path, devices: Install) -> None:
    """NVFP4 in another layout, beside weights that are quantized."""
    make, config = convert_checks.SOURCES["nvfp4"]
    convert_checks.write(tmp_path / "s", make(), config)
    opened = devices(1 << 26)
    check(tmp_path / "s", COMPRESSED)
    assert opened[0].calls == {}


# --- devices and memory ---


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_two_devices_share_the_work(tmp_path: Path, devices: Install, workers: int) -> None:
    source = write_checkpoint(tmp_path / "s", llama(layers=6), shards=4)
    opened = devices(1 << 26, 1 << 26)
    check(source, COMPRESSED, replace(GPU, workers=workers))
    assert all(device.calls.get("quantize", 0) for device in opened) == (workers > 1)


@pytest.mark.parametrize(("limit", "workers"), [(5 << 12, 4), (9 << 12, 2), (1 << 16, 5), (1 << 20, 3)])
def test_memory_stays_below_the_limit(tmp_path: Path, devices: Install, limit: int, workers: int) -> None:
    """Also with fewer lanes than workers: one that waits for a lane must not be waited for by the one that has it."""
    source = write_checkpoint(tmp_path / "s", llama(layers=3), shards=3)
    opened = devices(1 << 26, 1 << 26)
    resources = replace(GPU, workers=workers, max_gpu_memory=limit, max_memory=(1 << 22) + 6 * STAGED, chunk=1000)
    outcome = check(source, COMPRESSED, resources)
    assert outcome.pieces_on_cpu == 0
    for device in opened:
        assert 0 < device.most_used <= limit
    assert opened[0].most_pinned > STAGED


@pytest.mark.parametrize(("workers", "cards"), [(1, 1), (3, 1), (3, 2)])
def test_pinned_memory_counts_in_max_memory(tmp_path: Path, devices: Install, workers: int, cards: int) -> None:
    """That of workers, which would take all of it for pieces of a megabyte, and that of lanes."""
    weights = {f"model.layers.{i}.mlp.down_proj.weight": random(i, 4096, 256) for i in range(4)}
    opened = devices(*[1 << 28] * cards)
    limit = most_lanes(workers, cards) * STAGED + workers * (1 << 20)
    resources = replace(GPU, workers=workers, max_memory=limit, chunk=1 << 20)
    check(write_checkpoint(tmp_path / "s", weights, shards=4), COMPRESSED, resources)
    assert STAGED < max(device.most_pinned for device in opened) <= limit


def test_the_pinned_memory_of_a_lane_must_fit(tmp_path: Path, devices: Install) -> None:
    plan = make_plan(write_checkpoint(tmp_path / "s", llama()), COMPRESSED)
    opened = devices(1 << 26)
    text = rf"^--max-memory 1,000,000 is too little: .* read files through {STAGED:,} of their own; [0-9,]+ are enough$"
    with pytest.raises(InputError, match=text) as caught:
        run(plan, tmp_path / "d", replace(GPU, max_memory=1_000_000))
    enough = int(str(caught.value).split()[-3].replace(",", ""))
    assert STAGED < enough < STAGED + 3_000_000
    run(plan, tmp_path / "d", replace(GPU, max_memory=enough))
    assert opened[0].most_pinned <= enough


def test_the_default_is_a_quarter_of_what_is_free(tmp_path: Path, devices: Install) -> None:
    opened = devices(1 << 22)
    check(write_checkpoint(tmp_path / "s", llama(), shards=2), COMPRESSED)
    assert 0 < opened[0].most_used <= 1 << 20


@pytest.mark.parametrize("kind", ["amax", "survey", "quantize"])
@pytest.mark.parametrize("calls", [{0}, {3, 4, 5}, set(range(10_000))], ids=["first", "some", "all"])
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_out_of_memory_loses_nothing(tmp_path: Path, devices: Install, kind: str, calls: set[int], chunk: int) -> None:
    def prepare(device: FakeDevice) -> None:
        device.failures = {kind: calls}

    devices(1 << 26, prepare=prepare)
    source = write_checkpoint(tmp_path / "s", llama(), shards=3)
    outcome = check(source, COMPRESSED, replace(GPU, chunk=chunk))
    assert outcome.pieces_on_cpu >= (14 if kind == "quantize" and len(calls) > 100 else 0)
    if chunk == 1 << 20 and kind == "quantize" and len(calls) > 100:
        assert outcome.pieces_on_cpu == 14


def test_memory_that_others_take_meanwhile(tmp_path: Path, devices: Install) -> None:
    """The lanes that were planned cannot all be made: the others do the work."""

    def prepare(device: FakeDevice) -> None:
        device.free = lambda: 1 << 24  # type: ignore[method-assign]

    opened = devices(3 << 20, prepare=prepare)
    outcome = check(write_checkpoint(tmp_path / "s", llama(), shards=2), COMPRESSED, replace(GPU, workers=2))
    assert opened[0].most_used == 2 << 20
    assert outcome.pieces_on_cpu == 0


def test_no_memory_at_all_is_the_cpu(tmp_path: Path, devices: Install) -> None:
    def prepare(device: FakeDevice) -> None:
        device.free = lambda: 1 << 24  # type: ignore[method-assign]

    opened = devices(1000, prepare=prepare)
    outcome = check(write_checkpoint(tmp_path / "s", llama(), shards=2), COMPRESSED)
    assert opened[0].calls == {}
    assert outcome.pieces_on_cpu >= 14


@pytest.mark.parametrize(
    ("memory", "limit", "error", "message"),
    [
        (1 << 26, 100, InputError, "--max-gpu-memory 100 is too little; at least 4,096"),
        (5000, None, UnsupportedError, "cuda:0 has 5,000 bytes free.*--max-gpu-memory.*--device cpu"),
    ],
)
def test_too_little_memory_is_refused_before_anything_is_written(
    tmp_path: Path, devices: Install, memory: int, limit: int | None, error: type[Exception], message: str
) -> None:
    devices(memory)
    plan = make_plan(write_checkpoint(tmp_path / "s", llama()), COMPRESSED)
    with pytest.raises(error, match=message):
        run(plan, tmp_path / "d", replace(GPU, max_gpu_memory=limit))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("gaussian", [True, False], ids=["usual", "4over6"])
def test_how_often_a_matrix_is_read_that_no_device_holds(
    tmp_path: Path, devices: Install, monkeypatch: pytest.MonkeyPatch, gaussian: bool
) -> None:
    """For its amax, for the sample together with the usual candidates, and to be quantized; once more for others."""
    weight = random(0, 1024, 256)
    assert weight.size > SMALL
    if not gaussian:
        made = hb.quantize(weight.astype(np.float32), "nvfp4", "modelopt", hb.FourSix("mse", e4m3_max=256))
        weight = np.asarray(hb.dequantize(made)).astype(ml_dtypes.bfloat16)
    source = write_checkpoint(tmp_path / "s", {"model.layers.0.mlp.down_proj.weight": weight})
    options = Options(layout="compressed-tensors", contract="modelopt", method="optimal")
    expected, counted = on_cpu(source, options), [0]
    read_by = Files.read_by

    def counting(files: Files, file: str, offset: int, size: int, reader: Callable[[int], int]) -> None:
        counted[0] += size
        read_by(files, file, offset, size, reader)

    monkeypatch.setattr(Files, "read_by", counting)
    opened = devices(1 << 26)
    run(make_plan(source, options), tmp_path / "gpu", replace(GPU, chunk=1 << 14, workers=1, max_gpu_memory=1 << 17))
    assert all_bytes(tmp_path / "gpu") == expected
    assert opened[0].calls["survey"] >= 2 * 32
    places = sorted(set(opened[0].rows_before))  # on which a sample depends
    assert places == list(range(0, 1024, places[1]))
    assert counted[0] == (3 if gaussian else 4) * weight.nbytes


# --- errors and interruptions ---


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("to", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_bad_values_are_named_as_on_the_cpu(
    tmp_path: Path, devices: Install, value: float, to: str, chunk: int
) -> None:
    tensors = llama()
    tensors["model.layers.0.mlp.up_proj.weight"][70, 5] = value
    tensors["model.layers.1.mlp.down_proj.weight"][3, 8] = value
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, shards=2), replace(COMPRESSED, to=to))
    said = []
    for name, resources in (("cpu", CPU), ("gpu", GPU)):
        devices(1 << 26)
        with pytest.raises(CheckpointError) as caught:
            run(plan, tmp_path / name, replace(resources, chunk=chunk))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "up_proj" in said[0]
    assert "row 70, column 5" in said[0]


@pytest.mark.parametrize("call", [0, 6, 13])
def test_a_device_that_breaks_loses_nothing(tmp_path: Path, devices: Install, call: int) -> None:
    source = write_checkpoint(tmp_path / "s", llama(layers=4), shards=4)
    expected = on_cpu(source, COMPRESSED)

    def prepare(device: FakeDevice) -> None:
        device.breaks_at = call

    opened = devices(1 << 26, prepare=prepare)
    plan = make_plan(source, COMPRESSED)
    with pytest.raises(RuntimeError, match="launch failure"):
        run(plan, tmp_path / "d", GPU)
    assert opened[0].pinned == {}
    assert not (tmp_path / "d" / "config.json").exists()
    devices(1 << 26)
    run(plan, tmp_path / "d", GPU)
    assert all_bytes(tmp_path / "d") == expected


def test_stopped_and_continued(tmp_path: Path, devices: Install) -> None:
    source = write_checkpoint(tmp_path / "s", llama(layers=4), shards=4)
    expected = on_cpu(source, COMPRESSED)
    opened = devices(1 << 26, 1 << 26)

    def report(event: Event) -> None:
        if event.kind == "shard":
            raise KeyboardInterrupt

    plan = make_plan(source, COMPRESSED)
    for _ in range(10):
        try:
            run(plan, tmp_path / "d", GPU, report=report)
            break
        except KeyboardInterrupt:
            assert all(device.pinned == {} for device in opened)
            assert not (tmp_path / "d" / "config.json").exists()
    assert all_bytes(tmp_path / "d") == expected


@pytest.mark.parametrize(("to", "lane"), [("nvfp4", None), ("nvfp4", 1 << 17), ("mxfp4", None), ("mxfp4", 1 << 17)])
def test_bad_values_of_a_matrix_that_memory_does_not_hold(
    tmp_path: Path, devices: Install, to: str, lane: int | None
) -> None:
    """Its pieces are read anew, one after the other in the same memory; or pass through a small lane each."""
    weight = random(0, 4096, 256)
    weight[4000, 7] = np.nan
    source = write_checkpoint(tmp_path / "s", {"model.layers.0.mlp.up_proj.weight": weight})
    plan = make_plan(source, replace(COMPRESSED, to=to))
    devices(1 << 26)
    memory = (1 << 20) + STAGED
    small = Resources(1, device="cuda", max_memory=memory, max_gpu_memory=lane, sync=False, chunk=1 << 14)
    with pytest.raises(CheckpointError, match=r"up_proj holds NaN \(1 of 1,048,576 values, the first at row 4000, col"):
        run(plan, tmp_path / "d", small)


def test_tensors_that_are_copied_take_the_room_of_one_piece(tmp_path: Path, devices: Install) -> None:
    """Workers beside devices have no more, and several of them are one task."""
    chunk = 1 << 20
    tensors = llama(layers=1) | {f"model.norm{i}.weight": random(i, chunk // 2 - 1) for i in range(3)}
    devices(1 << 26)
    check(write_checkpoint(tmp_path / "s", tensors), COMPRESSED, replace(GPU, chunk=chunk, workers=1))


def test_a_lane_that_just_holds_the_largest_job_takes_it_whole(tmp_path: Path, devices: Install) -> None:
    """Partners that lie in other shards pass through it one at a time; every source is quantized in one call."""
    source = write_checkpoint(tmp_path / "s", llama(), shards=5)
    plan, chunk = make_plan(source, replace(COMPRESSED, method="amax")), 1000
    engine = Engine(plan.format, plan.contract, plan.method, plan.repairs)
    members = {group: [unit for unit in plan.units if unit.group == group] for group in range(len(plan.groups))}
    need = max(
        whole_need(engine, [unit for unit in members[group] if unit in shard.units], members[group], chunk)
        for group in members
        for shard in plan.shards
        if any(unit in shard.units for unit in members[group])
    )
    resources = replace(GPU, workers=1, chunk=chunk)
    enough = need + -need % 512
    for room, whole in ((enough, True), (enough - 512, False)):
        opened = devices(1 << 26)
        check(source, replace(COMPRESSED, method="amax"), replace(resources, max_gpu_memory=room))
        assert (opened[0].calls["quantize"] == len(plan.units)) is whole
        shutil.rmtree(tmp_path / "gpu")


def test_small_scales_of_a_source_go_with_it(tmp_path: Path, devices: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    made: list[DeviceWork] = []

    class Noted(DeviceWork):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(conversion, "DeviceWork", Noted)
    monkeypatch.setattr(convert_checks, "SHAPES", {"gate_proj": (256, 256), "up_proj": (256, 256)})
    make, config = convert_checks.SOURCES["fp8 tensor"]
    convert_checks.write(tmp_path / "s", make(), config)
    devices(1 << 26)
    for memory in (1 << 18, 1 << 24):  # in pieces, and whole
        run(
            make_plan(tmp_path / "s", Options()),
            tmp_path / f"{memory}",
            replace(GPU, chunk=1 << 14, workers=1, max_gpu_memory=memory),
        )
        assert made[-1]._scales == {}
    assert len(made) == 2
