"""Lanes: how many, how large, and who gets which."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from halfbyte.checkpoint.execute.device.lanes import SMALLEST_LANE, Lanes, lane_sizes
from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.errors import InputError, UnsupportedError
from tests.checkpoint.execute.device.fake import GARBAGE, FakeDevice

GIB = 1 << 30


def fake(*memories: int) -> list[FakeDevice]:
    engine = Engine(None, None, None, repairs=False)
    return [FakeDevice(f"cuda:{i}", engine, memory) for i, memory in enumerate(memories)]


@pytest.mark.parametrize(
    ("memories", "workers", "limit", "count", "size"),
    [
        ([128 * GIB], 16, None, 16, GIB // 2),  # 8 GiB and no more, unasked
        ([4 * GIB], 8, None, 8, GIB // 8),  # a quarter of what is free
        ([4 * GIB], 8, 2 * GIB, 8, GIB // 4),
        ([4 * GIB], 8, 64 * GIB, 8, GIB // 2),  # not more than is free
        ([4 * GIB, GIB], 8, None, 4, GIB // 16),  # as many as the device with the least memory can have
        ([128 * GIB], 16, 3 * SMALLEST_LANE, 3, SMALLEST_LANE),  # fewer than workers
        ([128 * GIB, 128 * GIB], 3, None, 2, 4 * GIB),
    ],
)
def test_sizes(memories: list[int], workers: int, limit: int | None, count: int, size: int) -> None:
    assert lane_sizes(fake(*memories), workers, limit) == (count, size)


def test_too_little() -> None:
    with pytest.raises(InputError, match="--max-gpu-memory 1,000 is too little"):
        lane_sizes(fake(GIB), 4, 1000)
    with pytest.raises(UnsupportedError, match="cuda:1 has 1,000 bytes free"):
        lane_sizes(fake(GIB, 1000), 4, None)


def test_the_device_with_the_least_to_do() -> None:
    lanes = Lanes(fake(1000, 1000, 1000), 2, 100)
    with lanes.borrow(5) as a, lanes.borrow(2) as b, lanes.borrow(3) as c:
        assert [lane.device.name for lane in (a, b, c)] == ["cuda:0", "cuda:1", "cuda:2"]
        with lanes.borrow(9) as d, lanes.borrow(1) as e:
            assert [lane.device.name for lane in (d, e)] == ["cuda:1", "cuda:2"]
    with lanes.borrow(1) as again:
        assert again is a


def test_a_lane_is_waited_for() -> None:
    lanes = Lanes(fake(1000), 1, 100)
    order = []

    def second() -> None:
        with lanes.borrow(1):
            order.append("second")

    thread = threading.Thread(target=second)
    with lanes.borrow(1):
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_memory_is_taken_from_the_front_and_given_back() -> None:
    with Lanes(fake(10_000), 1, 4096).borrow(1) as lane:
        first = lane.take(5)
        mark = lane.mark()
        assert mark == 512
        lane.take(3584)
        with pytest.raises(DeviceMemoryError):
            lane.take(1)
        lane.release(mark)
        assert len(lane.take(3584)) == 3584
        assert len(first) == 5


def test_an_error_gives_the_lane_back() -> None:
    lanes = Lanes(fake(1000), 1, 100)
    with pytest.raises(ValueError, match="mine"), lanes.borrow(1):
        raise ValueError("mine")
    with lanes.borrow(1) as lane:
        assert lane.mark() == 0


def test_after_an_error_nothing_uses_the_buffers_of_the_task() -> None:
    (device,) = fake(1000)
    device.pause = lambda: 0.05  # type: ignore[method-assign]
    host = np.zeros(10, np.uint8)
    device.pin(host)

    def fail() -> None:
        with Lanes([device], 1, 100).borrow(1) as lane:
            lane.stream.download(lane.take(10), host)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert host.tolist() == [GARBAGE] * 10


def test_no_memory_for_any_lane() -> None:
    lanes = Lanes(fake(50, 60), 2, 100)
    with pytest.raises(DeviceMemoryError, match="no device has 100 bytes"), lanes.borrow(1):
        pass


def test_closing_gives_all_back() -> None:
    devices = fake(1000, 1000)
    lanes = Lanes(devices, 2, 100)
    with lanes.borrow(1), lanes.borrow(1):
        pass
    assert [device.used for device in devices] == [100, 100]
    lanes.close()
    assert [(device.used, device.pinned) for device in devices] == [(0, {}), (0, {})]


@pytest.mark.parametrize(
    ("memory", "workers", "limit", "count", "size"),
    [
        (4 * SMALLEST_LANE, 5, None, 1, SMALLEST_LANE),  # a quarter of it is just one lane
        (SMALLEST_LANE, 1, SMALLEST_LANE, 1, SMALLEST_LANE),
        (GIB, 1, SMALLEST_LANE + 511, 1, SMALLEST_LANE),  # whole cache lines of the device
        (GIB, 1, SMALLEST_LANE + 512, 1, SMALLEST_LANE + 512),
        (GIB, 9, 2 * SMALLEST_LANE - 1, 1, 2 * SMALLEST_LANE - 512),
        (GIB, 3, 4 * SMALLEST_LANE, 3, 44_739_072),  # a third of it, less 341 bytes
    ],
)
def test_sizes_that_just_fit(memory: int, workers: int, limit: int | None, count: int, size: int) -> None:
    assert lane_sizes(fake(memory), workers, limit) == (count, size)


def test_one_byte_too_little() -> None:
    with pytest.raises(InputError) as refused:
        lane_sizes(fake(GIB), 1, SMALLEST_LANE - 1)
    assert str(refused.value) == "--max-gpu-memory 33,554,431 is too little; at least 33,554,432 are needed"
    for memory, limit in ((4 * SMALLEST_LANE - 1, None), (SMALLEST_LANE - 1, GIB)):
        with pytest.raises(UnsupportedError) as small:
            lane_sizes(fake(GIB, memory), 1, limit)
        assert str(small.value) == (
            f"device cuda:1 has {memory:,} bytes free, and a conversion takes a quarter of them, at least 33,554,432; "
            "free some, set --max-gpu-memory, choose another device, or use --device cpu"
        )


def test_a_lane_begins_where_its_memory_does() -> None:
    """Kernels load several bytes at once."""
    with Lanes(fake(1000), 1, 100).borrow(1) as lane:
        first = lane.take(100)
        lane.release()
        again = lane.take(1)
        assert first.ctypes.data == again.ctypes.data == lane._memory.ctypes.data


def test_a_lane_is_waited_for_however_often_it_was_lent() -> None:
    lanes, order = Lanes(fake(1000), 1, 100), list[str]()
    for _ in range(3):
        with lanes.borrow(1):
            pass

    def second() -> None:
        with lanes.borrow(1):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with lanes.borrow(1):
            waiting = pool.submit(second)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            order.append("first")
        waiting.result(10)
    assert order == ["first", "second"]


def test_a_device_that_was_full_does_not_count_as_busy() -> None:
    """It has one lane of the two that were planned; what it could not do burdens another."""
    lanes = Lanes(fake(150, 1000), 2, 100)
    with ExitStack() as held, ExitStack() as of_others:
        first = held.enter_context(lanes.borrow(2))
        other = of_others.enter_context(lanes.borrow(5))
        more = of_others.enter_context(lanes.borrow(10))
        assert [lane.device.name for lane in (first, other, more)] == ["cuda:0", "cuda:1", "cuda:1"]
        held.close()
        with lanes.borrow(1) as again:
            assert again is first


def test_who_waits_hears_that_there_is_no_memory() -> None:
    """The one lane that was planned cannot be made: both that want it are told."""
    (device,) = fake(1000)
    asked, go_on, tries = threading.Event(), threading.Event(), list[int]()

    def allocate(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        tries.append(size)
        asked.set()
        assert go_on.wait(10)
        raise DeviceMemoryError("others took it")

    device.allocate = allocate  # type: ignore[method-assign]
    lanes = Lanes([device], 1, 100)

    def borrow() -> None:
        with lanes.borrow(1):
            pass

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(borrow)]
        assert asked.wait(10)
        both.append(pool.submit(borrow))
        with pytest.raises(TimeoutError):
            both[1].result(0.05)
        go_on.set()
        for one in both:
            with pytest.raises(DeviceMemoryError, match="no device has 100 bytes free"):
                one.result(10)
    assert tries == [100], "once is enough"


def test_what_is_wrong_beside_memory_is_not_tried_elsewhere() -> None:
    lanes = Lanes(fake(1000, 1000), 1, 100)
    lanes.devices[0].allocate = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="launch failure"), lanes.borrow(1):
        pass


def broken(size: int) -> None:
    raise RuntimeError("an unspecified launch failure")
