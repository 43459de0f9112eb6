"""The machine and versions of a benchmark, and its timing: in rounds, with every operation once per round."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import itertools
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import halfbyte as hb
from halfbyte.backends.cpu.library import ISAS, library_path, load_library, native

Array = npt.NDArray[Any]

ROOT = Path(__file__).parents[1]
PEERS = ("torchao", "nvidia-modelopt", "compressed-tensors", "qwantize", "transformer_engine")
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi")


@dataclass
class Timed:
    """One call that is timed many times. `call` and `prepare` get the number of the buffer to work on."""

    call: Callable[[int], object]
    prepare: Callable[[int], None] = lambda buffer: None
    """Preparation right before each call, outside the measured time."""
    keep: Callable[[object], object] = lambda result: result
    """The part of the last result to keep; it is checked after the timing."""
    times: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    """Processor time / wall time of each call. If it is below the thread count, other processes used the machine."""
    kept: object = None

    def run(self, buffer: int) -> None:
        """Time one call."""
        self.prepare(buffer)
        used, start = time.process_time(), time.perf_counter()
        result = self.call(buffer)
        seconds, used = time.perf_counter() - start, time.process_time() - used
        self.times.append(seconds)
        self.cores.append(used / seconds)
        self.kept = self.keep(result)

    def forget(self) -> None:
        """Drop all measurements."""
        self.times.clear()
        self.cores.clear()

    @property
    def best(self) -> float:
        return min(self.times)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def rates(self, size: int) -> dict[str, float | int]:
        """Calls, seconds and GB/s of `size` bytes."""
        return {
            "calls": len(self.times),
            "best_s": self.best,
            "median_s": self.median,
            "cores": round(self.cores[self.times.index(self.best)], 2),
            "gb_s": size / self.best / 1e9,
            "median_gb_s": size / self.median / 1e9,
        }


def run_rounds(timed: Sequence[Timed], buffers: int, seconds: float, rounds: tuple[int, int]) -> int:
    """Time everything once per round, in a new order each, until the time or the largest number of rounds is used up.

    So a slow phase of the machine affects all operations alike. Every call takes the next buffer, so that no call finds
    its input in the cache because the previous call read it. `rounds`: the smallest and the largest number of rounds.
    """
    order, shuffle = list(timed), random.Random(0).shuffle
    least, most = rounds
    start, done, buffer = time.perf_counter(), 0, 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while done < least or (done < most and time.perf_counter() - start < seconds):
            shuffle(order)
            for one in order:
                one.run(buffer)
                buffer = (buffer + 1) % buffers
            done += 1
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    return done


def reuse_memory() -> bool:
    """Make malloc keep freed memory instead of returning it, so that results are written to pages that already exist.

    Then only the work of the kernels is measured. A process that allocates new memory for each result also has the cost
    of the page faults (`--memory fresh`). The peers benefit as well. Returns False if the C library cannot do this.
    """
    trim_threshold, mmap_max = -1, -4  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def choose_instruction_set(name: str) -> None:
    """Make the library use an instruction set from now on, and check that it does."""
    if os.environ.get("HALFBYTE_ISA") != name:
        os.environ["HALFBYTE_ISA"] = name
        if native()[1] != ISAS[name]:
            raise RuntimeError(f"the library does not follow HALFBYTE_ISA={name}")


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore HALFBYTE_ISA at the end, and torch's thread count if torch is loaded."""
    isa, torch = os.environ.get("HALFBYTE_ISA"), sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    try:
        yield
    finally:
        os.environ.pop("HALFBYTE_ISA", None)
        if isa is not None:
            os.environ["HALFBYTE_ISA"] = isa
        if torch is not None:
            torch.set_num_threads(threads)


def instruction_sets(wanted: Sequence[str]) -> list[str]:
    """The wanted instruction sets that the library has and this machine runs; the portable code if there is none."""
    library = load_library()
    best = int(library.hb_best_isa()) if library is not None else 0
    return [name for name in wanted if ISAS[name] <= best] or ["portable"]


def copier(threads: int) -> Callable[[Array, Array], None]:
    """A function that copies an array into another with memcpy, by one thread or by several with equal parts."""
    if threads == 1:
        return lambda target, source: np.copyto(target, source)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="memcpy")

    def copy(target: Array, source: Array) -> None:
        edges = [source.size * i // threads for i in range(threads + 1)]
        parts = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

    return copy


def copy_speed(size: int = 64 << 20, times: int = 5) -> float:
    """A quick measurement of one thread's copy speed in GB/s. The ratios use the row memcpy of the table instead."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    timed = Timed(lambda buffer: np.copyto(target, source), keep=lambda result: None)
    run_rounds([timed], 1, 0, (times, times))
    return size / timed.best / 1e9


def available_memory() -> int:
    """Bytes that can be allocated without swapping; 0 if the system does not tell."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    return int(found[1]) * 1024 if found else 0


def describe_machine() -> dict[str, Any]:
    """CPU model, cores, caches, instruction sets, memory, copy speed."""
    info = _read("/proc/cpuinfo")

    def first(key: str) -> str:
        found = re.search(rf"^{key}\s*:\s*(.*)$", info, re.MULTILINE)
        return found[1] if found else ""

    flags = first("flags").split()
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    total = re.search(r"MemTotal:\s+(\d+) kB", _read("/proc/meminfo"))
    return {
        "cpu": first("model name") or platform.processor() or platform.machine(),
        "cpu_family_model": "/".join(filter(None, (first("cpu family"), first("model")))),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "caches": [f"L{_read(c / 'level')} {_read(c / 'type')} {_read(c / 'size')}" for c in caches],
        "memory_gb": round(int(total[1]) * 1024 / 1e9, 1) if total else 0.0,
        "hypervisor": "hypervisor" in flags,
        "system": platform.platform(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "copy_gb_s": round(copy_speed(), 2),
    }


def describe_versions(peers: bool) -> dict[str, str]:
    """Versions of Python, numpy, halfbyte and its library, with the compiler; also of torch and the peers."""
    library, path = load_library(), library_path()
    compiler = re.search(rb"(GCC: \([^)]*\) [0-9.]+|clang version [0-9.]+)", path.read_bytes()) if path else None
    versions = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "halfbyte": f"{hb.__version__} ({_commit()})",
        "library": _age(path),
        "compiler": compiler[1].decode() if compiler else "unknown",
        "compiler flags": library.hb_build_flags().decode() if library is not None else "no compiled library",
    }
    return versions | ({name: distribution_version(name) for name in ("torch", *PEERS)} if peers else {})


def distribution_version(name: str) -> str:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def load_average() -> list[float]:
    """The load average over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def _age(path: Path | None) -> str:
    """When the library was built, and whether its sources have changed since."""
    if path is None:
        return "none"
    built = path.stat().st_mtime
    sources = [source for source in (ROOT / "src" / "halfbyte" / "native").glob("*") if source.is_file()]
    stale = any(source.stat().st_mtime > built for source in sources)
    return time.strftime("%F %T", time.localtime(built)) + (", OLDER THAN ITS SOURCES" if stale else "")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "commit unknown"


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
