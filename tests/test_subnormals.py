"""A thread that flushes subnormal numbers, as torch.set_flush_denormal(True) makes it: the same bits all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte as hb
from halfbyte import subnormals
from halfbyte.calibration import calibrate, evaluate, solve_sequentially
from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.errors import UnsupportedError
from halfbyte.online import Config, quantize_named
from halfbyte.subnormals import are_flushed, subnormals_kept
from halfbyte.testing import assert_same_bits
from tests.calibration.scenes import model, windows
from tests.checkpoint.toy import write_checkpoint

CASES = [
    ("nvfp4", "modelopt", "optimal"),
    ("nvfp4", "qwantize", "optimal"),
    ("nvfp4", "transformer_engine", "four_six"),
    ("nvfp4", "torchao", "amax"),
    ("mxfp4", None, "optimal"),
    ("mxfp8", None, "amax"),
]


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def tiny(rows: int = 8, columns: int = 64, exponent: int = -126) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Numbers around the smallest normal one."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((rows, columns)) * np.exp(3 * generator.standard_normal((rows, 1)))
    return np.ldexp(values, exponent).astype(np.float32)


def same(make: Callable[[], Any], of: Callable[[Any], list[Any]]) -> None:
    """The arrays of what is made are the same with and without flushing, and the mode is left as it was."""
    wanted = of(make())
    with flushing():
        assert are_flushed()
        found = of(make())
        assert are_flushed()
    assert not are_flushed()
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(np.asarray(one), np.asarray(other))


def parts(q: hb.QuantizedTensor) -> list[Any]:
    return [part for part in (q.codes, q.scales, q.stored_scale) if part is not None]


@pytest.mark.parametrize(("format", "contract", "method"), CASES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("exponent", [-126, -140])
def test_tensors(format: str, contract: str | None, method: str, backend: str, exponent: int) -> None:
    x = tiny(exponent=exponent)
    q = hb.quantize(x, format, contract, method, backend=backend)
    same(lambda: hb.quantize(x, format, contract, method, backend=backend), parts)
    same(lambda: hb.quantize(x.reshape(2, 4, 64), format, contract, method, backend=backend, threads=2), parts)
    same(lambda: hb.dequantize(q, backend=backend), lambda found: [found])
    same(lambda: hb.error(q, x), lambda found: [found.block_squared])


def test_without_flushing_kept_bits_would_differ() -> None:
    """The tensors of the test above do depend on it: what runs inside is the flushing thread's own arithmetic."""
    x = tiny()
    with flushing():
        assert (x * np.float32(0.25) * np.float32(4) != x).any()
    assert (x * np.float32(0.25) * np.float32(4) == x).mean() > 0.5


def test_casts_searches_and_feedback() -> None:
    x = tiny(exponent=-120)
    source = hb.quantize(x, "mxfp4")
    same(lambda: hb.cast(source, "nvfp4")[0], parts)
    same(lambda: hb.cast(source, "nvfp4", "requantize")[0], parts)
    same(lambda: hb.search_global_scale(x, "modelopt", "amax").quantized, parts)
    moment = np.diag(np.arange(1, 65)).astype(np.float32)
    same(lambda: hb.gptq(x, moment, "nvfp4"), parts)
    same(lambda: hb.quantize(np.stack([x, x]), "nvfp4", scaling="expert"), parts)
    same(lambda: hb.fake_quant(torch.from_numpy(x), "nvfp4"), lambda found: [found.numpy()])


def test_checkpoints(tmp_path: Path) -> None:
    """The workers of a conversion are threads, which begin in the mode of the one that starts them."""
    name = "model.layers.0.mlp.down_proj.weight"
    source = write_checkpoint(tmp_path / "source", {name: tiny(32, 64, -120)})

    def converted() -> list[Any]:
        target = tmp_path / f"made {are_flushed()}"
        run(make_plan(source, Options()), target, Resources(workers=2))
        return [np.frombuffer(file.read_bytes(), np.uint8) for file in sorted(target.glob("*.safetensors"))]

    same(converted, list)
    pairs = [(name, tiny(32, 64, -120))]
    same(lambda: quantize_named(pairs, Rules(), Config()), lambda found: [np.asarray(array) for _, array in found])


def model_of_small_numbers(folder: Path) -> Path:
    """Its embedding is subnormal, and the first norm makes numbers of a usual size of that."""
    path = model(folder)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("embed_tokens.weight"):
                tensors[name] = tensors[name].float() * 2.0**-130
            elif name.endswith("layers.0.input_layernorm.weight"):
                tensors[name] = tensors[name].float() * 2.0**120
        save_file(tensors, file, {"format": "pt"})
    return path


def test_models_that_are_run(tmp_path: Path) -> None:
    """calibrate, eval, sequential GPTQ: what a model computes in this process, in the threads it starts too."""
    path, text = model_of_small_numbers(tmp_path), windows(2, 16)
    plan = make_plan(path, Options())

    def layers(folder: Path) -> list[Any]:
        return [np.frombuffer(file.read_bytes(), np.uint8) for file in sorted(folder.glob("layer-*"))]

    def calibrated() -> list[Any]:
        return layers(calibrate(path, text, tmp_path / f"statistics {are_flushed()}").path)

    def solved() -> list[Any]:
        folder = tmp_path / f"solved {are_flushed()}"
        solve_sequentially(plan, text, folder)
        return layers(folder)

    same(calibrated, list)
    same(solved, list)
    same(lambda: evaluate(path, path, text), lambda found: [np.array(found.perplexity.value)])


def test_tables_that_are_made_on_import() -> None:
    """In a process that flushed before halfbyte was loaded."""
    program = (
        "import sys, torch, numpy as np\n"
        "if sys.argv[1] == '1': torch.set_flush_denormal(True)\n"
        "import halfbyte as hb\n"
        "x = np.random.default_rng(0).integers(0, 1 << 24, (8, 64), np.uint32).view(np.float32)\n"
        "for format in ('nvfp4', 'mxfp4', 'mxfp8'):\n"
        "    for backend in ('cpu', 'reference'):\n"
        "        q = hb.quantize(x, format, method='optimal' if format != 'mxfp8' else 'amax', backend=backend)\n"
        "        print(q.codes.tobytes().hex(), q.scales.tobytes().hex(), q.dequantize().tobytes().hex())\n"
    )
    made = [
        subprocess.run([sys.executable, "-c", program, on], capture_output=True, text=True, check=True).stdout
        for on in "01"
    ]
    assert made[0] == made[1]
    assert len(made[0].splitlines()) == 6


def test_where_nothing_can_be_done_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subnormals, "_library", lambda: None)
    with subnormals_kept():
        pass
    with flushing(), pytest.raises(UnsupportedError, match=r"flushes subnormal numbers to zero.*set_flush_denormal"):
        hb.quantize(tiny(), "nvfp4")
