"""Build the source archive and the wheel, and try the wheel where nothing else of the project is. `make wheel`.

    python tests/wheel.py [FOLDER]

writes both into FOLDER (dist/), the wheel with the oldest manylinux tag that its symbols allow. Then it looks at what
is inside, and installs the wheel with the pinned requirements into an empty virtual environment whose PATH has no
compiler. There the golden vectors must agree and a small checkpoint must convert, by the compiled kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "halfbyte"


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="halfbyte-wheel-") as name:
        temporary = Path(name)
        # The wheel is built from the archive, so an archive that lacks a file fails here.
        tool("build", "--no-isolation", "--outdir", str(temporary / "built"), str(ROOT))
        (built,) = (temporary / "built").glob("*.whl")
        (archive,) = (temporary / "built").glob("*.tar.gz")
        tool("auditwheel", "repair", "--wheel-dir", str(folder), str(built))
        shutil.copy(archive, folder)
        (wheel,) = folder.glob("*.whl")
        tool("twine", "check", "--strict", *map(str, sorted(folder.iterdir())))
        check_contents(wheel)
        check_archive(archive)
        try_out(wheel, temporary)
    print(f"wheel: {wheel.name} and {archive.name} in {folder}")


def tool(*command: str) -> None:
    """A module of this environment as a command; programs that it calls come from the same environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env={**os.environ, "PATH": path})


def check_contents(wheel: Path) -> None:
    """Every module, the table of architectures, the CUDA sources, the typing marker and the library; nothing else."""
    if "-py3-none-manylinux" not in wheel.name:
        raise SystemExit(f"wheel: {wheel.name} has no manylinux tag")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    shipped = [path for suffix in ("py", "json", "cu", "cuh", "typed") for path in PACKAGE.rglob(f"*.{suffix}")]
    wanted = {path.relative_to(PACKAGE.parent).as_posix() for path in shipped}
    wanted.add("halfbyte/backends/cpu/libhalfbyte_cpu.so")
    if missing := sorted(wanted - names):
        raise SystemExit(f"wheel: {wheel.name} lacks {', '.join(missing)}")
    known = tuple(f"halfbyte-{wheel.name.split('-')[1]}.{kind}/" for kind in ("dist-info", "data"))
    if foreign := sorted(name for name in names - wanted if not name.startswith(known)):
        raise SystemExit(f"wheel: {wheel.name} holds {', '.join(foreign)}, which should stay out")


def check_archive(archive: Path) -> None:
    """Nothing that was built: an installer would ship it as its own."""
    with tarfile.open(archive) as opened:
        if built := [name for name in opened.getnames() if name.endswith((".so", ".pyc"))]:
            raise SystemExit(f"wheel: {archive.name} holds {', '.join(built)}, which should stay out")


def try_out(wheel: Path, temporary: Path) -> None:
    """Install the wheel alone and use it."""
    home = temporary / "clean"
    venv.create(home, with_pip=True)
    environment = {"PATH": str(home / "bin"), "HOME": str(temporary)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}

    def run(*command: str) -> None:
        subprocess.run([str(home / "bin" / command[0]), *command[1:]], check=True, cwd=temporary, env=environment)

    pip = ("python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary", ":all:")
    run(*pip, "-r", str(ROOT / "requirements.txt"))
    run(*pip, "--no-deps", str(wheel))
    run("python", "-I", "-W", "error", str(Path(__file__)), "--inside", wheel.name.split("-")[1])
    run("halfbyte", "conform", "--backend", "cpu", str(ROOT / "conformance" / "vectors.zip"))
    run("halfbyte", "convert", "source", "made")
    run("halfbyte", "verify", "made", "--against", "source")


def check_inside(version: str) -> None:
    """In the clean environment: the installed package, its kernels and their bits. Leaves a checkpoint in `source`."""
    import numpy as np
    from safetensors.numpy import save_file

    import halfbyte as hb
    from halfbyte.backends.cpu.library import load_library
    from halfbyte.testing import assert_same_bits

    home = Path(hb.__file__).parent
    library = load_library()
    if hb.__version__ != version or not home.is_relative_to(sys.prefix):
        raise SystemExit(f"wheel: this is halfbyte {hb.__version__} of {home}, not the wheel's {version}")
    if library is None or not Path(library._name).is_relative_to(home):
        raise SystemExit("wheel: the compiled kernels were not loaded")
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        given, compiled, defined = (hb.quantize(x, name, backend=backend) for backend in ("auto", "cpu", "reference"))
        for q in (given, compiled):
            assert_same_bits(q.codes, defined.codes, inputs=x)
            assert_same_bits(q.scales, defined.scales, inputs=x)
    source = Path("source")
    source.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": x, "model.norm.weight": x[0]}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main(ROOT / "dist")
        case ["--inside", expected]:
            check_inside(expected)
        case [target]:
            main(Path(target).resolve())
        case _:
            raise SystemExit(__doc__)
