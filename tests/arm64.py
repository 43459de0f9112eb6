"""The portable kernels on arm64, without an arm64 machine: cross-compiled, and run by qemu. `make test-arm64`.

    python tests/arm64.py

builds the library for arm64 with the project's own CMakeLists.txt, and once more for this machine. A probe
(arm64_probe.cpp) runs the kernels of both on the same inputs, here with every instruction set. All hashes must be
equal; other tests compare the kernels of this machine with the numpy reference. Needs the Debian packages
g++-aarch64-linux-gnu and qemu-user-static.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CROSS, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
FOR_ARM64 = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}")
PACKAGES = {CROSS: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user-static", "g++": "g++"}


def find_cmake() -> str:
    """CMake of PATH, of this Python, or of the project's virtual environment."""
    folders = [Path(sys.executable).parent, ROOT / ".venv" / "bin"]
    found = shutil.which("cmake") or next((shutil.which("cmake", path=str(folder)) for folder in folders), None)
    if found is None:
        raise SystemExit("arm64: cmake is missing; pip install cmake")
    return found


def build(cmake: str, compiler: str, options: tuple[str, ...], folder: Path) -> tuple[Path, Path]:
    """The library and the probe for one architecture."""
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(folder), *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(folder), "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    probe = folder / "probe"
    # The probe computes the kernels' numbers: it must round as they do.
    flags = ["-O1", "-std=gnu++17", "-ffp-contract=off"]
    source = str(ROOT / "tests" / "arm64_probe.cpp")
    subprocess.run([compiler, *flags, source, "-o", str(probe), "-ldl"], check=True)
    return folder / "libhalfbyte_cpu.so", probe


def output_of(*command: str) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main() -> None:
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise SystemExit(f"arm64: {program} is missing; install the package {package}")
    cmake = find_cmake()
    with tempfile.TemporaryDirectory(prefix="halfbyte-arm64-") as name:
        library, probe = build(cmake, CROSS, FOR_ARM64, Path(name) / "arm64")
        emulated = output_of(EMULATOR, "-L", SYSROOT, str(probe), str(library), "0")
        library, probe = build(cmake, "g++", (), Path(name) / "here")
        here = output_of(str(probe), str(library), "0")
        for isa in widest(library):
            if output_of(str(probe), str(library), isa) != here:
                raise SystemExit(f"arm64: instruction set {isa} of this machine differs from its portable kernels")
    for mine, theirs in zip(here, emulated, strict=True):
        if mine != theirs:
            raise SystemExit(f"arm64: this machine has {mine!r}, arm64 {theirs!r}")
    print(f"arm64: {len(here)} hashes agree")


def widest(library: Path) -> list[str]:
    """The instruction sets above the portable one that this machine has."""
    return [str(isa) for isa in range(1, ctypes.CDLL(str(library)).hb_best_isa() + 1)]


if __name__ == "__main__":
    main()
