"""Lanes: parts of the memory of devices, each with a stream. A task holds one while it computes.

Copies and kernels of one lane run in order, those of several lanes at the same time: while one lane computes, others
copy in both directions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from halfbyte.checkpoint.execute.device.protocol import Device, DeviceMemoryError, Memory
from halfbyte.errors import InputError, UnsupportedError

SMALLEST_LANE = 32 << 20
"""Bytes below which a lane is not worth having: fewer are made instead."""

LARGEST_DEFAULT = 8 << 30
"""More memory than this makes nothing faster, so that it is never taken unasked."""

ALIGNMENT = 512


class Lane:
    """A stream, and memory that is taken from the front, like an Arena's."""

    def __init__(self, device: Device, size: int) -> None:
        self.device = device
        self._memory = device.allocate(size)
        self.size = size
        self.stream = device.stream()
        self._used = 0

    def take(self, size: int) -> Memory:
        """The next `size` bytes, until the lane is released to an earlier mark."""
        start, stop = self._used, self._used + size
        if stop > self.size:
            raise DeviceMemoryError(f"a lane of {self.size:,} bytes is full")
        self._used = stop + -stop % ALIGNMENT
        return self._memory[start:stop]

    def mark(self) -> int:
        return self._used

    def release(self, mark: int = 0) -> None:
        """Give back what was taken after the mark. What is queued on it runs before whatever is queued next."""
        self._used = mark


def lane_sizes(devices: Sequence[Device], workers: int, limit: int | None) -> tuple[int, int]:
    """Lanes per device, and the bytes of each.

    limit: bytes per device; None: a quarter of what is free, at most 8 GiB. Raises if some device has not enough
    memory for the smallest lane.
    """
    wanted = -(-workers // len(devices))
    budgets = []
    for device in devices:
        free = device.free()
        budget = min(free, limit) if limit is not None else min(free // 4, LARGEST_DEFAULT)
        if limit is not None and limit < SMALLEST_LANE:
            raise InputError(f"--max-gpu-memory {limit:,} is too little; at least {SMALLEST_LANE:,} are needed")
        if budget < SMALLEST_LANE:
            raise UnsupportedError(
                f"device {device.name} has {free:,} bytes free, and a conversion takes a quarter of them, at least "
                f"{SMALLEST_LANE:,}; free some, set --max-gpu-memory, choose another device, or use --device cpu"
            )
        budgets.append(budget)
    lanes = max(1, min(wanted, min(budgets) // SMALLEST_LANE))
    return lanes, min(budgets) // lanes // ALIGNMENT * ALIGNMENT


class Lanes:
    """The lanes of all devices. Threads borrow them; each goes to the device with the least to do."""

    def __init__(self, devices: Sequence[Device], count: int, size: int) -> None:
        self.devices, self.count, self.size = tuple(devices), count, size
        self._free: dict[str, list[Lane]] = {device.name: [] for device in devices}
        self._room = {device.name: count for device in devices}
        """Lanes that may still be made."""
        self._load = {device.name: 0 for device in devices}
        """Source bytes of the tasks that hold a lane."""
        self._borrowed = 0
        self._change = threading.Condition()

    @contextlib.contextmanager
    def borrow(self, load: int) -> Iterator[Lane]:
        """A lane for a task of that many source bytes. Who holds one must not wait for other tasks.

        Raises DeviceMemoryError if no device has memory for a single one.
        """
        lane = self._take(load)
        try:
            lane.stream.begin()
            yield lane
        except BaseException:
            lane.stream.record().wait()  # nothing may still use the buffers of this task
            raise
        finally:
            lane.release()
            with self._change:
                self._load[lane.device.name] -= load
                self._borrowed -= 1
                self._free[lane.device.name].append(lane)
                self._change.notify()

    def _take(self, load: int) -> Lane:
        while True:
            device, lane = self._reserve(load)
            if lane is not None:
                return lane
            try:
                return Lane(device, self.size)  # takes long, and others may go on meanwhile
            except BaseException as error:
                with self._change:
                    self._load[device.name] -= load
                    self._borrowed -= 1
                    self._change.notify_all()
                    if not isinstance(error, DeviceMemoryError):
                        raise
                    self._room[device.name] = 0

    def _reserve(self, load: int) -> tuple[Device, Lane | None]:
        """A free lane, or a device on which the caller may make one. Waits until there is either."""
        with self._change:
            while True:
                for device in sorted(self.devices, key=lambda device: self._load[device.name]):
                    name = device.name
                    if self._free[name] or self._room[name]:
                        self._load[name] += load
                        self._borrowed += 1
                        if self._free[name]:
                            return device, self._free[name].pop()
                        self._room[name] -= 1
                        return device, None
                if not self._borrowed:
                    raise DeviceMemoryError(f"no device has {self.size:,} bytes free")
                self._change.wait()

    def close(self) -> None:
        """Give the memory back. No lane is borrowed any more."""
        for lanes in self._free.values():
            for lane in lanes:
                lane.stream.close()
            lanes.clear()
