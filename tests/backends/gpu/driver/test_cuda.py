"""The launchers, against a driver that writes launches down: packing, grids, streams, contexts, refusals."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halfbyte.backends.gpu.driver import cuda
from halfbyte.backends.gpu.driver.commands import Address, Command, Image, Program, Slot
from halfbyte.backends.gpu.driver.cuda import context_of, encode, entries, function_of, launch_words
from halfbyte.errors import BackendError
from tests.backends.gpu.driver.fake import FakeDriver


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(built: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    yield built.use(monkeypatch)
    for kept in (cuda.entries, cuda.context_of, cuda.shared_memory_of):
        kept.cache_clear()


@dataclass(frozen=True)
class Given:
    """A kernel whose image is known."""

    name: str
    threads: int
    shared: int
    words: int

    def image(self, architecture: str) -> Image:
        return Image(b"code", self.name, self.threads, self.shared, self.words)

    def interpret(self, grid: tuple[int, int], arguments: list[torch.Tensor | int]) -> None:
        raise AssertionError("this is launched")


FIRST, SECOND = Given("one", 128, 0, 5), Given("second", 1024, 100_000, 2)
PROGRAM = Program(
    (
        Command(FIRST, (7, 1), (Address(Slot.X), Address(Slot.SMALL, 64), 1 << 40)),
        Command(SECOND, (3, 2), (Address(Slot.GIVEN), Address(Slot.TABLES, 16)), overlaps=True),
    )
)
SLOTS = (0x100, 0x200, 0x300, 0x400, 0x500, 0x600)


def words_of(index: int = 0) -> ctypes.Array[ctypes.c_uint64]:
    functions = [function_of(index, "sm_90", kernel) for kernel in PROGRAM.kernels()]
    return encode(PROGRAM, context_of(index), functions, ctypes.addressof(entries()))


@pytest.fixture(params=["compiled", "python"])
def launch(request: pytest.FixtureRequest) -> cuda.Launcher:
    if request.param == "python":
        return launch_words
    found = cuda.launcher()
    assert found is not launch_words, "the compiled library has no hb_cuda_launch: build it again"
    return found


def test_a_program_is_launched_as_it_says(driver: FakeDriver, launch: cuda.Launcher) -> None:
    words = words_of()
    assert launch(ctypes.addressof(words), 0xABC, *SLOTS) == 0
    first, second = driver.launches
    assert (first.stream, first.context, list(first.grid), list(first.threads)) == (
        0xABC, 0x1000, [7, 1, 1], [128, 1, 1],
    )  # fmt: skip
    assert (first.shared, first.overlaps, first.size) == (0, 0, 40)
    assert list(first.words[:5]) == [0x100, 0x440, 1 << 40, 0, 0]  # parameters beyond the arguments are zero
    assert (list(second.grid), list(second.threads), second.shared, second.overlaps) == (
        [3, 2, 1], [1024, 1, 1], 100_000, 1,
    )  # fmt: skip
    assert list(second.words[:2]) == [0x500, 0x610]
    assert (first.function, second.function) == (0x5003, 0x5006)


def test_every_device_has_its_own_context(driver: FakeDriver, launch: cuda.Launcher) -> None:
    """The thread's own context comes back: here it has none, on device 1 and on device 2."""
    for index in (1, 2):
        assert launch(ctypes.addressof(words_of(index)), 0, *SLOTS) == 0
        current = ctypes.c_void_p()
        driver.library.cuCtxGetCurrent(ctypes.byref(current))
        assert current.value is None
    assert [made.context for made in driver.launches] == [0x1001, 0x1001, 0x1002, 0x1002]
    assert driver.number("stack_depth").value == 0


def test_the_launch_that_fails_is_the_last(driver: FakeDriver, launch: cuda.Launcher) -> None:
    driver.number("fails_at").value = 1
    assert launch(ctypes.addressof(words_of()), 0, *SLOTS) == 9
    assert len(driver.launches) == 1
    assert driver.number("stack_depth").value == 0
    with pytest.raises(BackendError, match=r"launching one: refused by the test \(9\)"):
        cuda.check(9, "launching one")


def test_words_that_are_no_program_are_refused(driver: FakeDriver) -> None:
    """The compiled launcher has room for 64 parameters and six slots."""
    compiled = cuda.launcher()
    for place, wrong in ((3 + 6, 65), (3 + 7, 7)):
        words = words_of()
        words[place] = wrong
        assert compiled(ctypes.addressof(words), 0, *SLOTS) == 1
    assert driver.launches == []


def test_threads_share_a_program(driver: FakeDriver, launch: cuda.Launcher) -> None:
    words = words_of()
    work = [
        threading.Thread(target=lambda at=at: launch(ctypes.addressof(words), at, at, 0, 0, 0, 0, 0))
        for at in range(1, 9)
    ]
    for thread in work:
        thread.start()
        thread.join()
    first = driver.launches[::2]
    assert sorted(made.words[0] for made in first) == sorted(made.stream for made in first) == list(range(1, 9))


def test_a_kernel_is_loaded_once_per_device(driver: FakeDriver) -> None:
    before = driver.number("loads").value
    assert function_of(0, "sm_90", FIRST) is function_of(0, "sm_90", Given("one", 128, 0, 5))
    function_of(1, "sm_90", FIRST)
    assert driver.number("loads").value - before == 2


def test_too_much_shared_memory_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(BackendError, match="giving large 232449 bytes of shared memory"):
        function_of(0, "sm_90", Given("large", 32, 232449, 1))


def test_a_device_that_is_not_there(driver: FakeDriver) -> None:
    with pytest.raises(BackendError, match="finding device 8"):
        context_of(8)


def test_without_the_compiled_function_python_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "library_path", lambda: None)
    cuda.launcher.cache_clear()
    assert cuda.launcher() is launch_words
    cuda.launcher.cache_clear()
