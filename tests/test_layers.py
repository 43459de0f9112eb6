"""The direction of imports, read from the source; and that `import halfbyte` loads no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte

SOURCE = Path(halfbyte.__file__).parent

LAYERS = [
    "errors",
    "child",
    "subnormals",
    "formats",
    "codec",
    "methods",
    "contracts",
    "arrays",
    "tensor_parts",
    "types",
    "foreign_arrays",
    "request",
    "backends",
    "prepared",
    "device_calls",
    "tracing",
    "one_call",
    "on_device",
    "experts",
    "quantize",
    "gpu",
    "torch_ops",
    "quantization_error",
    "saved",
    "search",
    "straight_through",
    "feedback",
    "casting",
    "halfbyte",  # the package itself: its public names
    "models",
    "layouts",
    "statistics",
    "smoothing",
    "checkpoint",
    "load_check",
    "calibration",
    "online_batch",
    "online_plan",
    "online",
    "testing",
    "study",
    "conform",
    "verify",
    "scale",
    "cli",
]
"""From left to right. A module imports only from its left or its own package."""

NARROW = {
    "halfbyte": {
        *LAYERS[: LAYERS.index("halfbyte")],
        *("calibration", "checkpoint", "layouts", "online", "statistics", "testing", "verify"),  # as attributes
    },
    "models": {"errors", "child"},
    "load_check": {"errors", "child", "models", "checkpoint"},
    "layouts": {"errors", "formats", "codec", "arrays", "tensor_parts", "types", "models"},
    "statistics": {"errors"},
    "smoothing": {"errors"},
    "testing": {"errors", "arrays"},
}
"""Layers that need less than all to their left, and should go on doing so."""

FRAMEWORKS = ("torch", "triton", "ray", "plotly", "transformers", "typer", "rich")


ROOMS = ["io", "plan", "execute"]
"""The folders of checkpoint/. A module imports only from its left or its own folder."""


def layer(parts: tuple[str, ...]) -> str:
    """The layer of a module given as the parts of its name after `halfbyte`."""
    return parts[0] if parts else "halfbyte"


def imports(tree: ast.Module, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, layer) of every import from halfbyte, in functions and under TYPE_CHECKING as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (alias.name.split(".") for alias in node.names):
                if name[0] == "halfbyte":
                    yield node.lineno, layer(tuple(name[1:]))
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = ["halfbyte", *parts[: len(parts) - node.level], *base]
            if base == ["halfbyte"]:
                # `from halfbyte import contracts` is the layer contracts; any other name is the package's own
                for alias in node.names:
                    yield node.lineno, alias.name if alias.name in LAYERS else "halfbyte"
            elif base[:1] == ["halfbyte"]:
                yield node.lineno, layer(tuple(base[1:]))


def violations(source: str, parts: tuple[str, ...]) -> list[str]:
    """What a module imports and should not; parts is its name after `halfbyte`."""
    own = layer(parts)
    if own not in LAYERS:
        return [f"{own} is no layer: put it into LAYERS where it belongs"]
    allowed = NARROW.get(own, set(LAYERS[: LAYERS.index(own)])) | {own}
    return [
        f"{'.'.join(('halfbyte', *parts))}:{line} imports {found}, which is not to the left of {own}"
        for line, found in imports(ast.parse(source), parts)
        if found not in allowed
    ]


def modules() -> dict[str, tuple[str, ...]]:
    """Path of every module to the parts of its name. An __init__ counts as the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[str(path)] = parts[:-1] if parts[-1] == "__init__" else parts
    return found


MODULES = modules()


@pytest.mark.parametrize("path", MODULES, ids=[".".join(parts) or "halfbyte" for parts in MODULES.values()])
def test_imports_go_one_way(path: str) -> None:
    assert violations(Path(path).read_text(), MODULES[path]) == []


OPEN_BACKENDS = {
    "halfbyte.backends",
    "halfbyte.backends.amax",
    "halfbyte.backends.blocks",
    "halfbyte.backends.compare",
    "halfbyte.backends.device_reading",
    "halfbyte.backends.encoding",
    "halfbyte.backends.feedback",
    "halfbyte.backends.gpu",
    "halfbyte.backends.headroom",
    "halfbyte.backends.protocol",
    "halfbyte.backends.sha256",
    "halfbyte.backends.survey",
    "halfbyte.backends.threads",
    "halfbyte.backends.writing",
}
"""What other layers may import of the backends; the rest is their insides."""


def backends_imported(source: str) -> set[str]:
    """The modules of backends/ that a module imports from."""
    tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            rooms = {f"{module}.{alias.name}" for alias in node.names if (SOURCE / "backends" / alias.name).is_dir()}
            found |= rooms if module == "halfbyte.backends" and rooms else {module}
    return {name for name in found if name.startswith("halfbyte.backends")}


@pytest.mark.parametrize("path", [path for path, parts in MODULES.items() if parts[:1] != ("backends",)])
def test_no_other_layer_imports_a_backend_from_inside(path: str) -> None:
    assert backends_imported(Path(path).read_text()) <= OPEN_BACKENDS


def test_a_backend_imported_from_inside_is_seen() -> None:
    source = "from halfbyte.backends.cpu.library import native\nfrom halfbyte.backends import Parts"
    assert backends_imported(source) == {"halfbyte.backends.cpu.library", "halfbyte.backends"}
    assert backends_imported("import halfbyte.backends.cpu.library") == {"halfbyte.backends.cpu.library"}
    assert backends_imported("from halfbyte.backends import cpu") == {"halfbyte.backends.cpu"}


def rooms_imported(source: str) -> set[str]:
    """The folders of checkpoint/ that a module imports from."""
    names = [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[2] for name in names if name.startswith("halfbyte.checkpoint.")}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_checkpoint_import_one_way(room: str) -> None:
    paths = sorted((SOURCE / "checkpoint" / room).glob("*.py"))
    assert len(paths) > 3
    for path in paths:
        assert rooms_imported(path.read_text()) <= set(ROOMS[: ROOMS.index(room) + 1]), path


def test_a_room_that_is_imported_is_seen() -> None:
    source = "from halfbyte.checkpoint.execute.pool import Event\nfrom halfbyte.checkpoint import run"
    assert rooms_imported(source) == {"execute"}


def test_every_layer_exists() -> None:
    assert {layer(parts) for parts in MODULES.values()} >= set(LAYERS)
    assert set(NARROW) <= set(LAYERS)


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        (("codec", "pack"), "from halfbyte.contracts import Contract"),
        (("codec", "pack"), "import halfbyte.contracts.spec"),
        (("codec", "pack"), "from halfbyte import contracts"),
        (("codec", "pack"), "from halfbyte import quantize"),
        (("codec", "pack"), "from halfbyte import QuantizedTensor"),
        (("codec", "pack"), "import halfbyte"),
        (("codec", "pack"), "def f():\n    from halfbyte.types import QuantizedTensor"),
        (("codec", "pack"), "if TYPE_CHECKING:\n    import numpy, halfbyte.backends"),
        (("codec", "pack"), "from ..backends import choose_backend"),
        (("codec", "pack"), "from .. import types"),
        (("formats",), "from halfbyte.codec.bits import F32"),
        (("contracts", "peers", "ocp"), "from halfbyte.arrays import like"),
        (("layouts", "gguf"), "from halfbyte.quantize import quantize"),
        (("layouts", "modelopt"), "from halfbyte.checkpoint.io.index import Tensor"),
        (("models", "partners"), "from halfbyte.layouts import LAYOUTS"),
        (("testing",), "from halfbyte.quantize import quantize"),
        (("quantize",), "from halfbyte.cli import app"),
        ((), "from halfbyte.conform import run_vectors"),
        (("helpers",), ""),
    ],
)
def test_a_bad_import_is_caught(parts: tuple[str, ...], source: str) -> None:
    assert len(violations(source, parts)) == 1


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        (("codec", "pack"), "from halfbyte.codec.bits import U8\nfrom halfbyte.formats.spec import BlockFormat"),
        (("codec", "pack"), "from .bits import U8"),
        (("contracts", "peers", "ocp"), "from halfbyte.contracts import exponents"),
        (("contracts", "peers", "ocp"), "from ..spec import Contract"),
        (("cli",), "import halfbyte\nfrom halfbyte.conform import run_vectors"),
        ((), "from halfbyte import contracts\nfrom halfbyte.quantize import quantize"),
        (("codec", "bits"), "import numpy as np\nfrom halfbytes import thing"),
    ],
)
def test_a_good_import_passes(parts: tuple[str, ...], source: str) -> None:
    assert violations(source, parts) == []


# --- what an import loads ---


def loaded_by(statement: str) -> list[str]:
    """Which of the frameworks a fresh interpreter holds after a statement."""
    program = f"import sys\n{statement}\nprint(*(name for name in {FRAMEWORKS!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


def test_import_loads_no_framework() -> None:
    assert loaded_by("import halfbyte") == []


def test_quantizing_numpy_loads_no_framework() -> None:
    use = "import numpy, halfbyte; halfbyte.dequantize(halfbyte.quantize(numpy.ones(32, numpy.float32), 'nvfp4'))"
    assert loaded_by(use) == []


def test_conformance_and_testing_load_no_framework() -> None:
    assert loaded_by("import halfbyte.conform, halfbyte.testing, halfbyte.layouts.swizzle") == []


def test_asking_a_framework_loads_none() -> None:
    """The child process loads it."""
    children = "halfbyte.load_check.in_transformers, halfbyte.load_check.in_vllm, halfbyte.models.model_class"
    assert loaded_by(f"import halfbyte.load_check, halfbyte.models.from_model, {children}") == []


@pytest.mark.parametrize(
    ("statement", "found"), [("import halfbyte, rich", ["rich"]), ("import halfbyte, typer", ["typer"])]
)
def test_a_loaded_framework_is_seen(statement: str, found: list[str]) -> None:
    """The test above can fail: typer brings rich along or not, but itself in any case."""
    assert set(loaded_by(statement)) >= set(found)


def test_every_framework_of_the_list_would_be_seen() -> None:
    stand_ins = "".join(f"sys.modules[{name!r}] = sys\n" for name in FRAMEWORKS)
    assert loaded_by(f"{stand_ins}import halfbyte") == list(FRAMEWORKS)


# --- what the package shows ---


def test_public_names() -> None:
    """Few, and each is there."""
    assert len(halfbyte.__all__) <= 26
    assert all(hasattr(halfbyte, name) for name in halfbyte.__all__)
    wanted = {"quantize", "dequantize", "get_format", "FourSix", "contracts", "QuantizedTensor", "HalfbyteError"}
    assert wanted <= set(halfbyte.__all__)


def test_typing_information_is_shipped() -> None:
    assert (SOURCE / "py.typed").exists()


# --- backends keep their insides to themselves ---

FACADES = {"halfbyte.backends.gpu": {"halfbyte.backends.gpu"}}
"""Packages of backends, and the modules of them that the rest of halfbyte may import from."""

GPU_ORDER = [
    "constants",
    "slots",
    "choose",
    "mx_tables",
    "operand",
    "device_cache",
    "driver",
    "launch",
    "hadamard",
    "exact_search",
    "peer_searches",
    "cuda",
    "dispatch",
    "programs",
    "backend",
    "feedback",
    "batch",
    "calls",
    "warm",
]
"""The modules of backends/gpu, from left to right. `triton` takes its constants from `constants` alone."""


def imported_modules(source: str) -> list[str]:
    """Absolute names of the modules that a module imports from."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names if node.module.endswith("gpu")]
    return found


def intrusions(source: str) -> list[str]:
    """What a module outside of a backend imports from its insides."""
    return [
        name
        for package, allowed in FACADES.items()
        for name in imported_modules(source)
        if name.startswith(f"{package}.") and name not in allowed and _is_module(name)
    ]


def _is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("path", [path for path, parts in MODULES.items() if parts[:2] != ("backends", "gpu")])
def test_nobody_imports_the_insides_of_the_gpu_backend(path: str) -> None:
    assert intrusions(Path(path).read_text()) == []


def test_an_intrusion_is_seen() -> None:
    assert intrusions("from halfbyte.backends.gpu.batch import cast_scales") == ["halfbyte.backends.gpu.batch"]
    assert intrusions("from halfbyte.backends.gpu import batch") == ["halfbyte.backends.gpu.batch"]
    assert intrusions("from halfbyte.backends.gpu import cast_scales") == []


@pytest.mark.parametrize("name", GPU_ORDER)
def test_the_gpu_backend_has_an_order(name: str) -> None:
    folder = SOURCE / "backends" / "gpu"
    files = [folder / f"{name}.py"] if (folder / f"{name}.py").exists() else sorted((folder / name).glob("*.py"))
    assert files
    for file in files:
        parts = [module.split(".") for module in imported_modules(file.read_text())]
        used = {part[3] for part in parts if part[:3] == ["halfbyte", "backends", "gpu"] and len(part) > 3}
        used &= set(GPU_ORDER)
        assert used <= {*GPU_ORDER[: GPU_ORDER.index(name)], name}, f"{file.name} imports from its right"
