"""Run every kernel under AddressSanitizer and UBSan, at sizes around every edge. `make sanitize`.

    python tests/sanitize.py

builds the library with -DHB_SANITIZE=ON, shows with three deliberate mistakes that both sanitizers work, and then runs
the kernels in a process that ends at the first report. numpy allocates its buffers with malloc, exactly as large as the
arrays, so there is a redzone directly before and after every input and output.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.backends.cases import Case, Matrix

ROOT = Path(__file__).parents[1]

BLOCKS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)
"""Numbers of blocks around 2, 4, 8 and 16, which one step of a kernel processes."""

INVENTED = range(10_000, 10_600)
"""Seeds of tests/invented.py; tests/backends/test_closed_world.py runs others."""

MISTAKES = {
    "read": "AddressSanitizer: heap-buffer-overflow",
    "write": "AddressSanitizer: heap-buffer-overflow",
    "misaligned": "runtime error: load of misaligned address",
}


# --- building, and the processes ---


def find_tool(name: str) -> str:
    """The path of a program, from PATH or from this virtual environment."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise SystemExit(f"sanitize: {name} is missing; pip install {name}")
    return found


def build(folder: Path) -> Path:
    """Build the library with both sanitizers."""
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    subprocess.run([*configure, "-DHB_SANITIZE=ON"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "libhalfbyte_cpu.so"


def runtimes(folder: Path) -> str:
    """The sanitizer libraries of the compiler that CMake chose. They must be loaded before anything else."""
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = next(line.split("=", 1)[1] for line in cache.splitlines() if line.startswith("CMAKE_CXX_COMPILER:"))
    found = []
    for name in ("libasan.so", "libubsan.so"):
        path = subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        if not Path(path).is_absolute():
            raise SystemExit(f"sanitize: {compiler} has no {name}; install GCC with its sanitizers")
        found.append(path)
    return " ".join(found)


def run_under_sanitizers(preload: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        # GCC 12 does not align 64-byte vectors on the fake stack of use-after-return, and then crashes.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(Path(__file__)), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="halfbyte-sanitize-") as name:
        folder = Path(name)
        library = build(folder)
        preload = runtimes(folder)
        for mistake, report in MISTAKES.items():
            result = run_under_sanitizers(preload, "--mistake", mistake, str(library))
            if result.returncode == 0 or report not in result.stderr:
                raise SystemExit(
                    f"sanitize: the sanitizers do not work: no {report!r} for {mistake!r}\n{result.stderr[-4000:]}"
                )
        print(f"sanitize: {len(MISTAKES)} deliberate mistakes were caught", flush=True)
        result = run_under_sanitizers(preload, "--run", str(library))
        print(result.stdout, end="")
        if result.returncode != 0 or "ERROR" in result.stderr or "runtime error" in result.stderr:
            print(result.stderr[-8000:], file=sys.stderr)
            raise SystemExit(f"sanitize: a report, or a failure (exit status {result.returncode})")
        if "kernel runs, no report" not in result.stdout:
            raise SystemExit("sanitize: the run ended early")


# --- inside a sanitized process ---


def make_mistake(mistake: str, path: str) -> None:
    """Make one wrong access. A sanitizer must end the process."""
    import numpy as np

    library = ctypes.CDLL(path)
    x = np.ones(64, np.float32)
    at, count = x.ctypes.data, 64
    if mistake == "read":
        count += 1
    elif mistake == "misaligned":
        at, count = at + 1, count - 1
    elif mistake == "write":
        codes, scales, table = np.zeros(32, np.uint8), np.zeros(4, np.uint8), np.zeros(256 * 16, np.float32)
        out = np.empty(63, np.float32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (codes, scales, table, out)]
        library.hb_decode(0, pointers[0], pointers[1], ctypes.c_int64(4), 16, pointers[2], 4, pointers[3])
        return
    library.hb_amax(0, ctypes.c_void_p(at), ctypes.c_int64(count), 2)


def run_everything(path: str) -> None:
    """Run every kernel, instruction set, dtype and edge case. A report ends the process; a wrong bit raises."""
    import halfbyte as hb
    from halfbyte.arrays import to_numpy
    from halfbyte.backends.cpu import library as cpu_library
    from halfbyte.testing import assert_same_bits
    from tests.backends import cases

    cpu_library.library_path = lambda: Path(path)
    library = cpu_library.load_library()
    if library is None or library._name != path:
        raise SystemExit("sanitize: another library was loaded")
    count = 0
    for dtype in cases.DTYPES:
        for case in chosen_cases(cases.served_cases(dtype)):
            for x in arrays_for(case, dtype):
                first: hb.QuantizedTensor | None = None
                for isa, number in cpu_library.ISAS.items():
                    if number > library.hb_best_isa():
                        continue
                    os.environ["HALFBYTE_ISA"] = isa
                    q = case.quantize(x, "cpu")
                    count += 1
                    if first is None:
                        first = q
                    assert_same_bits(q.codes, first.codes, inputs=x)
                    assert_same_bits(q.scales, first.scales, inputs=x)
                    if case.method == "amax":
                        values = [to_numpy(hb.dequantize(q, kind, "cpu")) for kind in ("float32", "bfloat16")]
                        count += len(values)
    for isa, number in cpu_library.ISAS.items():
        if number <= library.hb_best_isa():
            os.environ["HALFBYTE_ISA"] = isa
            count += move_bytes() + decode_much() + encode_files() + run_invented()
    cpu_library.RANGE_BYTES = 64  # threads on ranges of a few blocks
    os.environ["HALFBYTE_THREADS"] = "3"
    del os.environ["HALFBYTE_ISA"]
    for case in chosen_cases(cases.served_cases()):
        case.quantize(cases.make_input("block scales", "bf16"), "cpu")
        count += 1
    print(f"sanitize: {count} kernel runs, no report")


def run_invented() -> int:
    """Run invented formats, contracts and methods: the backend must give the reference's bytes or refuse."""
    import halfbyte as hb
    from halfbyte.testing import assert_same_bits
    from tests.invented import draw

    served = 0
    for seed in INVENTED:
        case = draw(seed)
        try:
            got = case.quantize("cpu")
        except hb.HalfbyteError:
            continue
        expected = case.quantize("reference")
        assert_same_bits(got.codes, expected.codes, inputs=case.x)
        assert_same_bits(got.scales, expected.scales, inputs=case.x)
        served += 1
    return served


def move_bytes() -> int:
    """Run the kernels without arithmetic on every edge case. Returns how many ran."""
    import numpy as np

    from halfbyte.backends.cpu.repack import cast_blocks

    table = np.arange(256, dtype=np.uint8)
    for blocks in BLOCKS:
        codes = np.resize(table, (blocks, 16)).copy()
        cast_blocks(codes, np.resize(table, blocks).copy(), table)
    return len(BLOCKS)


def decode_much() -> int:
    """Decode to outputs that are large enough to be written past the caches, at different addresses."""
    import numpy as np

    import halfbyte as hb

    x = np.ones((1031, 8192), np.float32)
    q = hb.quantize(x, "nvfp4")
    for offset in range(8):
        room = np.empty(x.size + offset, np.float16)
        hb.dequantize(q, "float16", "cpu", out=room[offset:].reshape(x.shape))
        if not (room[offset:] == 1).all():
            raise SystemExit("sanitize: a large output has other values")
    return 8


def encode_files() -> int:
    """From a file to a file in one call, with scratch memory of exactly the size that is asked for."""
    import numpy as np

    from tests.backends.test_encoding import BF16, CASES, encode, encoder, made

    kinds = [BF16, np.dtype(np.float32)]
    for format, contract, method in CASES:
        for dtype in kinds:
            for rows in (1, 683, 3001):
                with tempfile.TemporaryDirectory() as name:
                    encode(encoder(format, contract, method, dtype), made(rows, dtype), 5.0, Path(name), rows != 683)
    return len(CASES) * len(kinds) * 3


def chosen_cases(cases: list[Case]) -> Iterator[Case]:
    """One contract for every path through the kernels.

    The paths are multiplying, dividing, +0.0 with a sign, each error formula, codes that wrap, the peers' own searches.
    """
    plain = {"transformer_engine", "modelopt", "ocp"}
    for case in cases:
        name = case.contract.name
        if name == "qwantize" and case.contract.options:
            yield case
        if case.contract.options and not (name == "flashinfer" and case.method != "amax"):
            continue
        if name in plain or (name == "flashinfer" and case.method.startswith(("mae", "mse"))):
            yield case
        if (name == "fouroversix" and case.format == "nvfp4") or (name == "gguf" and case.method != "amax"):
            yield case


def arrays_for(case: Case, dtype: str) -> Iterator[Matrix]:
    """Matrices in separate buffers of exactly their size: edge cases, then odd shapes, numbers and addresses."""
    import numpy as np

    from tests.backends.cases import DTYPES, fits, make_input

    for blocks in BLOCKS:
        wide = np.resize(make_input("block scales", dtype), (1, blocks * case.block))
        yield wide
        yield wide.reshape(blocks, case.block)  # the searches by column have rows in their lanes
    if case.method in ("hessian", "descent"):  # the reference, which serves NaN, would take minutes
        yield make_input("bits in range", dtype).copy()
    else:
        for name in ("odd", "one element", "tiles", "bits", "nonfinite", "zeros"):
            x = make_input(name, dtype).copy()
            if fits(case, x):
                yield x
        yield np.full((3, 5 * case.block), np.nan, DTYPES[dtype])  # every block is irregular
    looked_up = case.format == "nvfp4" and case.block == 16 and case.contract.name == "transformer_engine"
    if case.method == "optimal" and dtype == "bf16" and looked_up:  # enough blocks for a look-up of errors
        for name in ("bits", "block scales"):
            yield np.resize(make_input(name, dtype), (1, 2049 * case.block))
    aligned = np.resize(make_input("block scales", dtype), (2, 3 * case.block))
    odd = np.zeros(aligned.nbytes + 1, np.uint8)[1:].view(DTYPES[dtype]).reshape(aligned.shape)
    odd[:] = aligned
    yield odd  # an odd address


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["--mistake", mistake, library_path]:
            make_mistake(mistake, library_path)
        case ["--run", library_path]:
            run_everything(library_path)
        case _:
            raise SystemExit(__doc__)
