"""Factors are chosen by the error of the outputs, and a smoothed checkpoint is the better model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from halfbyte.calibration.collect import Options as Collecting
from halfbyte.calibration.collect import calibrate
from halfbyte.calibration.evaluation import evaluate
from halfbyte.calibration.sample import Sample
from halfbyte.calibration.smooth import Problem, fit, fit_smoothing
from halfbyte.checkpoint import Options, Rules, make_plan, run
from halfbyte.cli.app import app
from halfbyte.cli.convert import convert as _  # noqa: F401  registers the command
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.formats import get_format
from halfbyte.models.folding import Fold, folds
from halfbyte.smoothing import FILE, read_smoothing, repeated
from halfbyte.statistics import open_statistics, write_statistics
from halfbyte.verify import verify
from tests.calibration.scenes import model, windows
from tests.checkpoint.toy import all_bytes
from tests.tiny_models import llama, write_checkpoint


def uneven(tmp_path: Path) -> Path:
    """A llama whose norms make some channels large, as those of trained models do."""
    tensors, config = llama()
    rng = np.random.default_rng(3)
    for name, x in tensors.items():
        if name.endswith("layernorm.weight"):
            tensors[name] = (x.astype(np.float32) * np.exp(1.2 * rng.standard_normal(x.shape))).astype(x.dtype)
    return write_checkpoint(tmp_path / "uneven", tensors, config)


def problem(seed: int = 0, activations: bool = True, width: int = 64) -> Problem:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((100, width)) * np.exp(rng.standard_normal(width))).astype(np.float32)
    w = rng.standard_normal((48, width)).astype(np.float32)
    format = get_format("nvfp4")
    return Problem(x, np.abs(x).max(axis=0), w, format, get_contract("modelopt", format), activations)


@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("fold", [Fold("mlp norm", "n", ("a",)), Fold("values", "v", ("o",), 2, 16)])
def test_factors_lower_the_error(activations: bool, fold: Fold) -> None:
    given = problem(activations=activations)
    found = fit(given, fold)
    assert found.shape == (64 // fold.repeats,)
    before = given.errors(np.zeros(64, np.int8)).sum()
    after = given.errors(repeated(found, fold.repeats, fold.head)).sum()
    assert after < (0.95 if fold.repeats == 1 and activations else 1) * before


def test_the_error_is_that_of_the_outputs() -> None:
    """With one channel, the estimate has no neglected products: it is the error itself, in both parts."""
    given = replace(problem(width=16), x=np.zeros((100, 16), np.float32))
    given.x[:, 3] = problem(width=16).x[:, 3]
    found = given.errors(np.zeros(16, np.int8)).sum()
    from halfbyte.quantize import dequantize, quantize

    def rounded(values: np.ndarray, amax: float) -> np.ndarray:
        q = quantize(values, "nvfp4", "modelopt", "amax", global_amax=np.float32(amax))
        return np.asarray(dequantize(q), np.float64)

    token = 1 / (given.x.astype(np.float64) ** 2).mean(axis=1)
    lost = (rounded(given.x, float(given.largest.max())) - given.x) @ given.w.T
    off = given.x @ (rounded(given.w, float(np.abs(given.w).max())) - given.w).T
    wanted = ((lost**2).sum(axis=1) * token).mean() + ((off**2).sum(axis=1) * token).mean()
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_smoothed_model_is_better(tmp_path: Path) -> None:
    source, text = uneven(tmp_path), windows(12)
    calibrate(source, text, tmp_path / "stats", Collecting("diagonal"))
    options = Options(activations="stats", statistics=tmp_path / "stats")
    smoothing = fit_smoothing(make_plan(source, options), tmp_path / "stats")
    assert len(smoothing.links) == 8
    kl = {}
    for name, each in {"plain": options, "smooth": replace(options, smoothing=smoothing)}.items():
        run(make_plan(source, each), tmp_path / name)
        kl[name] = evaluate(tmp_path / name, source, windows(8, seed=5), w4a4=True).kl.value
    assert kl["smooth"] < 0.9 * kl["plain"]
    assert verify(tmp_path / "smooth", source).count("error") == 0
    again = fit_smoothing(make_plan(source, options), open_statistics(tmp_path / "stats"), threads=3)
    assert again.digest == smoothing.digest
    assert [link.origin.split(".")[2] for link in smoothing.links] == list("00001111")


def test_places_come_in_the_order_of_layers() -> None:
    """Not in that of a set, which differs from process to process: the digest of factors is that of their list."""
    tensors, config = llama()
    modules = {name.removesuffix(".weight") for name in tensors if "layers.0." in name}
    modules = {name.replace("layers.0.", f"layers.{layer}.") for layer in (10, 0, 9, 2) for name in modules}
    found = [fold.origin for fold in folds(config, modules) if fold.kind == "mlp norm"]
    assert found == [f"model.layers.{layer}.post_attention_layernorm" for layer in (0, 2, 9, 10)]


def test_ranks_choose_the_same_factors(tmp_path: Path) -> None:
    """Each for itself, or read from the file of one that was earlier; the bytes are those of one process."""
    source = uneven(tmp_path)
    calibrate(source, windows(4), tmp_path / "stats", Collecting("full"))
    given = ("--stats", tmp_path / "stats", "--smooth", "--method", "gptq")
    assert command(source, tmp_path / "one", *given) == "0 "
    for rank in (1, 0):
        assert command(source, tmp_path / "d", *given, "--rank", rank, "--world-size", 2) == "0 "
        if rank:
            (tmp_path / "d.smoothing.json").unlink()
    assert not list(tmp_path.glob("*.part"))
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "one")


def command(*arguments: object) -> str:
    found = CliRunner().invoke(app, ["convert", *map(str, arguments), "--device", "cpu", "--quiet"])
    return f"{found.exit_code} {found.output}"


@pytest.mark.parametrize("method", ["gptq", "optimal"])
def test_one_command(tmp_path: Path, method: str) -> None:
    """--calibrate makes the statistics, the factors and the weights; the same command again has nothing to do."""
    source, text = uneven(tmp_path), tmp_path / "text.npy"
    np.save(text, windows(12).tokens.reshape(-1))
    given = ("--method", method, "--calibrate", text, "--length", 40, "--smooth", "--activations", "stats")
    assert command(source, tmp_path / "d", *given) == "0 "
    factors = tmp_path / "d.smoothing.json"
    assert read_smoothing(factors).digest == read_smoothing(tmp_path / "d" / FILE).digest
    assert (tmp_path / "d.solved").exists() == (method == "gptq")
    assert verify(tmp_path / "d", source).count("error") == 0
    written = factors.stat().st_mtime_ns
    assert command(source, tmp_path / "d", *given) == "0 "
    assert factors.stat().st_mtime_ns == written
    assert command(source, tmp_path / "e", *given, "--dry-run") == "0 "
    assert not list(tmp_path.glob("e*"))


def test_refusals_of_the_command(tmp_path: Path) -> None:
    source = model(tmp_path)
    assert "--smooth needs statistics: --stats DIR" in command(source, tmp_path / "d", "--smooth")
    text = tmp_path / "text.npy"
    np.save(text, windows(2).tokens.reshape(-1))
    assert "--calibrate belongs to --method gptq, --smooth and" in command(source, tmp_path / "d", "--calibrate", text)


def test_statistics_without_a_sample_are_refused(tmp_path: Path) -> None:
    source, stats = model(tmp_path), tmp_path / "stats"
    calibrate(source, windows(2), stats, Collecting("diagonal"))
    for file in stats.glob("*.safetensors"):
        found = open_statistics(file)
        known = {name: one for name in found.names if (one := found.get(name)) is not None}
        write_statistics(file, {name: replace(one, sample=None) for name, one in known.items()})
    with pytest.raises(CheckpointError, match="of no place where factors can go; calibrate again"):
        fit_smoothing(make_plan(source, Options()), stats)


def test_places_that_are_not_quantized_keep_their_factors(tmp_path: Path) -> None:
    source = uneven(tmp_path)
    calibrate(source, windows(4), tmp_path / "stats", Collecting("diagonal"))
    plan = make_plan(source, Options(rules=Rules(keep=("*.1.mlp.*",))))
    found = fit_smoothing(plan, tmp_path / "stats")
    assert {link.origin for link in found.links if "layers.1" in link.origin} == {
        "model.layers.1.input_layernorm",
        "model.layers.1.self_attn.v_proj",
    }


def test_other_models_are_refused(tmp_path: Path) -> None:
    source = model(tmp_path, "gpt_oss")
    calibrate(source, windows(2), tmp_path / "stats", Collecting("diagonal"))
    with pytest.raises(UnsupportedError, match="not known of the model type 'gpt_oss'"):
        fit_smoothing(make_plan(source, Options()), tmp_path / "stats")


def test_a_sample_is_drawn_evenly_and_again_the_same() -> None:
    import torch

    def drawn() -> np.ndarray:
        sample = Sample(4, torch.device("cpu"))
        for number in range(10):
            sample.add(torch.full((100, 4), float(number)) + torch.arange(100)[:, None] / 100)
        return sample.arrays()["sample"]

    found = drawn()
    assert found.shape == (256, 4)
    assert np.array_equal(found, drawn())
    counts = np.bincount(found[:, 0].astype(int), minlength=10)
    assert counts.sum() == 256
    assert counts.min() > 12
    assert len(np.unique(found[:, 0])) == 256
