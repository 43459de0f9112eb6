"""Conversions by statistics, and of solved weights: every output tensor is what the library gives for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

import halfbyte as hb
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute import solving
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.io.solved import SolvedWeight, write_solved
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.statistics import LinearStatistics, write_statistics
from halfbyte.testing import assert_same_bits
from tests.checkpoint.test_convert import amax, groups
from tests.checkpoint.toy import all_bytes, llama, random, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
SMALL = Resources(workers=2, max_memory=1 << 28, sync=False)
ONE = Resources(workers=1, max_memory=1 << 28, sync=False, chunk=1000)
"""Many small pieces, one after the other."""
CONTRACT = {"nvfp4": "modelopt", "mxfp4": "ocp"}


def linear(seed: int, width: int, **kept: bool) -> LinearStatistics:
    """Statistics of correlated inputs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, width)) @ (rng.standard_normal((width, width)) * np.exp(rng.standard_normal(width)))
    h = (x.T @ x / len(x)).astype(np.float32)
    at = np.arange(width // 16)
    parts: dict[str, Any] = {}
    if kept.get("full", True):
        parts["second_moment"] = (h + h.T) / 2
    if kept.get("blocks"):
        parts["blocks"] = h.reshape(width // 16, 16, width // 16, 16)[at, :, at, :]
    if kept.get("diagonal"):
        parts["diagonal"] = h.diagonal().copy()
    if kept.get("cross"):
        parts["cross_moment"] = (0.02 * h + 0.001 * rng.standard_normal(h.shape)).astype(np.float32)
    return LinearStatistics(300, width, float(np.abs(x).max()), **parts)


def statistics(
    folder: Path, tensors: dict[str, Array], without: str = "-", **kept: bool
) -> dict[str, LinearStatistics]:
    """A folder of statistics of every linear layer; q, k and v share theirs."""
    found: dict[str, LinearStatistics] = {}
    for layer in (0, 1):
        own, shared = {}, {}
        at = f"model.layers.{layer}"
        for number, names in enumerate(
            (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
             ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"])
        ):  # fmt: skip
            one = linear(10 * layer + number, tensors[f"{at}.{names[0]}.weight"].shape[1], **kept)
            for name in names:
                if without not in name:
                    own[f"{at}.{name}"] = one
                    shared[f"{at}.{name}"] = f"{at}.{names[0]}"
        write_statistics(folder / f"layer-{layer}.safetensors", own, shared)
        found |= own
    return found


def parts(made: dict[str, Array], module: str, layout: str, format: str) -> tuple[Array, Array]:
    """Codes and scales of a module in a layout."""
    codes = made[f"{module}.weight_packed" if layout == "compressed-tensors" else f"{module}.weight"]
    return codes, made[f"{module}.weight_scale"]


def rows_of(group: list[str], tensors: dict[str, Array]) -> Array:
    """The weights of modules that share a tensor scale as one matrix, in float32."""
    return np.concatenate([tensors[f"{module}.weight"] for module in group]).astype(np.float32)


def raised(x: Array) -> float:
    """The amax of a matrix with the headroom that Optimal chooses for it."""
    scales = [np.asarray(hb.quantize(x, "nvfp4", "modelopt", method).global_scale) for method in ("optimal", "amax")]
    headroom = min((1.0, 1.75, 2.0), key=lambda one: abs(one - scales[0] / scales[1]))
    return float(np.float32(headroom * np.float64(np.abs(x).max())))


@pytest.mark.parametrize(
    ("format", "layout"),
    [("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors")],
)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("cross", [False, True])
def test_gptq(tmp_path: Path, format: str, layout: str, dtype: npt.DTypeLike, cross: bool) -> None:
    tensors = llama(dtype=dtype)
    known = statistics(tmp_path / "stats", tensors, cross=cross)
    source = write_checkpoint(tmp_path / "s", tensors, shards=3)
    method = hb.Gptq(damping=0.02, descent=1)
    plan = make_plan(source, Options(to=format, layout=layout, method=method, statistics=tmp_path / "stats"))
    assert plan.choices["method"] == str(method)
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    headrooms = set()
    for group in groups():
        whole = rows_of(group, tensors)
        one = hb.gptq(
            whole, known[group[0]].second_moment, format, CONTRACT[format], damping=0.02, descent=1,
            cross_moment=known[group[0]].cross_moment,
        )  # fmt: skip
        headrooms.add(raised(whole) > float(amax(whole)))
        start = 0
        for module in group:
            q = one[start : start + len(tensors[f"{module}.weight"])]
            start += len(q.codes)
            codes, scales = parts(made, module, layout, format)
            assert_same_bits(codes, q.codes)
            assert_same_bits(scales, q.scales)
            if layout == "modelopt":
                assert q.global_scale is not None
                assert_same_bits(made[f"{module}.weight_scale_2"], q.global_scale)
    assert True in headrooms


def test_the_headroom_is_chosen_for_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `hb.gptq` counts weights, whatever the file holds: some contracts have other scales for bfloat16."""
    tensors = llama()
    seen: set[np.dtype[Any]] = set()
    statistics(tmp_path / "stats", tensors)
    source = write_checkpoint(tmp_path / "s", tensors)

    def recorded(name: str) -> None:
        whole = getattr(Engine, name)

        def call(self: Engine, *given: Any) -> Any:
            seen.update(np.dtype(one.dtype) for one in given if isinstance(one, np.ndarray))
            seen.update(one for one in given if isinstance(one, np.dtype))
            return whole(self, *given)

        monkeypatch.setattr(Engine, name, call)

    for name in ("survey", "between", "take_in", "tensor_scales"):
        recorded(name)
    run(make_plan(source, Options(method="gptq", statistics=tmp_path / "stats")), tmp_path / "d", ONE)
    assert seen == {np.dtype(np.float32)}


@pytest.mark.parametrize("method", ["gptq:headroom=1", "hessian:headroom=1"])
def test_headroom_1_is_the_amax(tmp_path: Path, method: str) -> None:
    """Of modules without statistics too."""
    tensors = llama()
    known = statistics(tmp_path / "stats", tensors, without="down_proj")
    source = write_checkpoint(tmp_path / "s", tensors)
    plan = make_plan(source, Options(method=method, statistics=tmp_path / "stats"))
    assert "headroom=(1.0,)" in str(plan.choices["method"])
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for group in groups():
        shared = float(amax(*(tensors[f"{module}.weight"] for module in group)))
        for module in group:
            x, q = tensors[f"{module}.weight"].astype(np.float32), None
            if module not in known:
                q = hb.quantize(x, "nvfp4", "modelopt", "optimal", global_amax=shared)
            elif method.startswith("gptq"):
                q = hb.gptq(x, known[module].second_moment, "nvfp4", "modelopt", global_amax=shared)
            if q is not None:
                assert_same_bits(made[f"{module}.weight"], q.codes)
            wanted = hb.quantize(x, "nvfp4", "modelopt", "amax", global_amax=shared)
            assert wanted.global_scale is not None
            assert_same_bits(made[f"{module}.weight_scale_2"], wanted.global_scale)


@pytest.mark.parametrize("method", ["gptq", "hessian"])
def test_workers_and_pieces_change_no_byte_and_runs_continue(tmp_path: Path, method: str) -> None:
    tensors = llama()
    statistics(tmp_path / "stats", tensors)
    source = write_checkpoint(tmp_path / "s", tensors, shards=2)
    plan = make_plan(source, Options(method=method, statistics=tmp_path / "stats"))
    run(plan, tmp_path / "a", SMALL)
    run(plan, tmp_path / "b", ONE)
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    assert run(plan, tmp_path / "a", SMALL).finished_before
    other = make_plan(source, Options(method="optimal"))
    assert other.fingerprint != plan.fingerprint
    statistics(tmp_path / "stats", tensors, without="down_proj")
    assert make_plan(source, Options(method=method, statistics=tmp_path / "stats")).fingerprint != plan.fingerprint


@pytest.mark.parametrize(
    ("format", "kept", "codes_by"),
    [
        *((format, kept, "nearest") for format in ("nvfp4", "mxfp4") for kept in ("full", "blocks", "diagonal")),
        ("nvfp4", "full", "descent"),
        ("mxfp4", "blocks", "descent"),
    ],
)
def test_hessian(tmp_path: Path, format: str, kept: str, codes_by: Literal["nearest", "descent"]) -> None:
    tensors = llama()
    known = statistics(tmp_path / "stats", tensors, "-", **{"full": False, kept: True})
    source = write_checkpoint(tmp_path / "s", tensors)
    spelled = "hessian" if codes_by == "nearest" else "hessian:descent"
    options = Options(to=format, layout="compressed-tensors", method=spelled, statistics=tmp_path / "stats")
    plan = make_plan(source, options)
    assert plan.choices["method"] == ("Hessian" if codes_by == "nearest" else "Hessian(codes='descent')")
    run(plan, tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    module, block = "model.layers.1.mlp.down_proj", hb.get_format(format).block
    found = known[module]
    method: Any
    if kept == "full":
        assert found.second_moment is not None
        h = np.stack([found.second_moment[i : i + block, i : i + block] for i in range(0, found.width, block)])
        method = hb.Hessian((h + h.swapaxes(1, 2)) / 2, codes_by)
    elif kept == "blocks":
        assert found.blocks is not None
        h = np.zeros((found.width // block, block, block), np.float32)
        for number, part in enumerate(found.blocks):
            at = number * 16 % block
            h[number * 16 // block, at : at + 16, at : at + 16] = (part + part.T) / 2
        method = hb.Hessian(h, codes_by)
    else:
        method = hb.Optimal(found.diagonal)
    x = tensors[f"{module}.weight"].astype(np.float32)
    shared = raised(x) if format == "nvfp4" else None
    q = hb.quantize(x, format, CONTRACT[format], method, global_amax=shared)
    codes, scales = parts(made, module, "compressed-tensors", format)
    assert_same_bits(codes, q.codes)
    assert_same_bits(scales, q.scales)


def test_second_moments_that_are_no_squares_are_named(tmp_path: Path) -> None:
    tensors, module = llama(), "model.layers.0.mlp.down_proj"
    known = linear(0, tensors[f"{module}.weight"].shape[1])
    assert known.second_moment is not None
    known.second_moment[0, 1] = known.second_moment[1, 0] = 1e6
    write_statistics(tmp_path / "stats" / "layer-0.safetensors", {module: known})
    source = write_checkpoint(tmp_path / "s", tensors)
    plan = make_plan(source, Options(method="hessian", statistics=tmp_path / "stats"))
    with pytest.raises(HalfbyteError, match=rf"second moments of {module}: h\[0\] is not positive semidefinite"):
        run(plan, tmp_path / "d", SMALL)


def test_a_module_without_statistics_is_optimal_and_listed(tmp_path: Path) -> None:
    tensors = llama()
    statistics(tmp_path / "stats", tensors, without="down_proj")
    source = write_checkpoint(tmp_path / "s", tensors)
    options = Options(method="gptq", statistics=tmp_path / "stats")
    plan = make_plan(source, options)
    assert plan.calibrated is not None
    assert set(plan.calibrated.fallback) == {f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)}
    assert plan.as_json()["without_statistics"] == dict(plan.calibrated.fallback)
    assert any("2 modules without usable statistics (it has no statistics)" in note for note in plan.notes)
    run(plan, tmp_path / "d", SMALL)
    x = tensors["model.layers.0.mlp.down_proj.weight"]
    q = hb.quantize(x.astype(np.float32), "nvfp4", "modelopt", "optimal")
    assert_same_bits(read_checkpoint(tmp_path / "d")["model.layers.0.mlp.down_proj.weight"], q.codes)
    with pytest.raises(CheckpointError, match=r"--strict-stats: 2 modules without usable statistics"):
        make_plan(source, Options(method="gptq", statistics=tmp_path / "stats", strict_statistics=True))


def test_gptq_needs_full_second_moments(tmp_path: Path) -> None:
    tensors = llama()
    statistics(tmp_path / "stats", tensors, full=False, blocks=True)
    source = write_checkpoint(tmp_path / "s", tensors)
    with pytest.raises(CheckpointError, match=r"serves none of the 14 modules.*no full second moments"):
        make_plan(source, Options(method="gptq", statistics=tmp_path / "stats"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "gptq"}, "needs statistics of the inputs"),
        ({"method": "optimal", "statistics": Path("x")}, "serve --method gptq and --method hessian, not optimal"),
        ({"statistics": Path("x")}, "not the default method"),
        ({"method": "gptq", "statistics": Path("nowhere")}, "nowhere is not there"),
        ({"to": "bf16", "statistics": Path("x")}, "not to bf16"),
        ({"strict_statistics": True}, "belongs to --stats"),
        ({"method": "gptq", "solved": Path("x")}, "leave out the method"),
        ({"solved": Path("nowhere")}, "holds no solved weights"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    source = write_checkpoint(tmp_path / "s", llama())
    with pytest.raises(HalfbyteError, match=error):
        make_plan(source, Options(**options))


def test_statistics_of_another_width(tmp_path: Path) -> None:
    tensors = llama()
    statistics(tmp_path / "stats", llama(inner=128))
    source = write_checkpoint(tmp_path / "s", tensors)
    plan = make_plan(source, Options(method="gptq", statistics=tmp_path / "stats"))
    with pytest.raises(CheckpointError, match="statistics are those of 128 inputs, but its weight has 96"):
        run(plan, tmp_path / "d", SMALL)


def test_experts_one_by_one_and_in_a_stack(tmp_path: Path) -> None:
    """An expert takes its own statistics. Those that no token reached count every square alike."""
    at = "model.layers.0.mlp.experts"
    tensors = {f"{at}.{e}.{name}_proj.weight": random(e, 32, 64) for e in range(3) for name in ("gate", "up")}
    tensors |= {f"{at}.{e}.down_proj.weight": random(e + 9, 64, 32) for e in range(3)}
    tensors["lm_head.weight"] = random(1, 32, 64)
    known: dict[str, LinearStatistics] = {}
    for e in range(3):
        known |= {f"{at}.{e}.{name}_proj": linear(e, 64) for name in ("gate", "up")}
        known[f"{at}.{e}.down_proj"] = linear(e + 5, 32)
    nothing = LinearStatistics(0, 32, 0.0, second_moment=np.zeros((32, 32), np.float32))
    known[f"{at}.2.down_proj"] = nothing
    write_statistics(tmp_path / "stats" / "a.safetensors", known)
    config = {"model_type": "qwen3_moe", "num_experts": 3}
    source = write_checkpoint(tmp_path / "s", tensors, config)
    run(make_plan(source, Options(method="gptq", statistics=tmp_path / "stats")), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for e in range(3):
        shared = raised(rows_of([f"{at}.{e}.gate_proj", f"{at}.{e}.up_proj"], tensors))
        q = hb.gptq(
            tensors[f"{at}.{e}.up_proj.weight"], linear(e, 64).second_moment, "nvfp4", "modelopt", global_amax=shared
        )
        assert_same_bits(made[f"{at}.{e}.up_proj.weight"], q.codes)
    last = tensors[f"{at}.2.down_proj.weight"]
    q = hb.quantize(last.astype(np.float32), "nvfp4", "modelopt", "optimal")
    assert_same_bits(made[f"{at}.2.down_proj.weight"], q.codes)


# --- solved weights ---


def solve(
    folder: Path, tensors: dict[str, Array], format: str, wrong: float = 1.0, headroom: tuple[float, ...] | None = None
) -> dict[str, Any]:
    """Codes that no quantizer would choose: those of the weights turned around. headroom: the first one is taken."""
    found = {}
    for group in groups():
        shared = amax(*(tensors[f"{module}.weight"] for module in group))
        shared = np.float32(np.float64(shared) * (headroom or (1,))[0])
        for module in group:
            x = tensors[f"{module}.weight"].astype(np.float32)[::-1]
            q = hb.quantize(x, format, CONTRACT[format], global_amax=shared if format == "nvfp4" else None)
            found[module] = q
            weight = SolvedWeight(
                np.asarray(q.codes), np.asarray(q.scales), np.float32(shared * wrong) if format == "nvfp4" else None
            )
            write_solved(
                folder / f"{module}.safetensors", {f"{module}.weight": weight}, q.format, q.contract, hb.Gptq(),
                headroom,
            )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("format", "layout"),
    [("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors")],
)
@pytest.mark.parametrize("resources", [SMALL, ONE])
def test_solved_codes_are_written(tmp_path: Path, format: str, layout: str, resources: Resources) -> None:
    tensors = llama()
    solved = solve(tmp_path / "solved", tensors, format)
    source = write_checkpoint(tmp_path / "s", tensors, shards=2)
    plan = make_plan(source, Options(to=format, layout=layout, solved=tmp_path / "solved"))
    assert plan.choices["method"] == str(hb.Gptq())
    run(plan, tmp_path / "d", resources)
    made = read_checkpoint(tmp_path / "d")
    for module, q in solved.items():
        codes, scales = parts(made, module, layout, format)
        assert_same_bits(codes, q.codes)
        assert_same_bits(scales, q.scales)
        if layout == "modelopt":
            assert_same_bits(made[f"{module}.weight_scale_2"], q.global_scale)


@pytest.mark.parametrize("headroom", [(2.0,), (1.3,)])
def test_solved_codes_keep_their_headroom(tmp_path: Path, headroom: tuple[float, ...]) -> None:
    """One of the usual ones, which nobody has to name, or another that the folder names."""
    tensors = llama()
    solved = solve(tmp_path / "solved", tensors, "nvfp4", 1.0, headroom)
    source = write_checkpoint(tmp_path / "s", tensors, shards=2)
    run(make_plan(source, Options(solved=tmp_path / "solved")), tmp_path / "d", SMALL)
    made = read_checkpoint(tmp_path / "d")
    for module, q in solved.items():
        assert_same_bits(made[f"{module}.weight"], q.codes)
        assert_same_bits(made[f"{module}.weight_scale_2"], q.global_scale)


def test_solved_weights_that_share_a_scale_have_one_headroom(tmp_path: Path) -> None:
    tensors = llama()
    solve(tmp_path / "a", tensors, "nvfp4")
    solve(tmp_path / "b", tensors, "nvfp4", headroom=(2.0,))
    name = "model.layers.0.mlp.up_proj.safetensors"
    saved = load_file(tmp_path / "b" / name)
    codes, scales, used = (saved[f"{name[:-11]}weight.{part}"] for part in ("codes", "scales", "global_amax"))
    weight = SolvedWeight(codes, scales, np.float32(used[0]))
    write_solved(
        tmp_path / "a" / name,
        {f"{name[:-11]}weight": weight},
        hb.get_format("nvfp4"),
        hb.contracts.modelopt(),
        hb.Gptq(),
    )
    source = write_checkpoint(tmp_path / "s", tensors)
    with pytest.raises(CheckpointError, match=r"mlp\..*_proj.weight was solved with the amax"):
        run(make_plan(source, Options(solved=tmp_path / "a")), tmp_path / "d", SMALL)


def test_solved_weights_that_do_not_fit(tmp_path: Path) -> None:
    tensors = llama()
    source = write_checkpoint(tmp_path / "s", tensors)
    solve(tmp_path / "a", tensors, "nvfp4")
    with pytest.raises(CheckpointError, match=r"solved for format nvfp4, but this conversion has mxfp4"):
        make_plan(source, Options(to="mxfp4", layout="compressed-tensors", solved=tmp_path / "a"))
    with pytest.raises(CheckpointError, match=r"solved for contract modelopt\(\), but this conversion has miles"):
        make_plan(source, Options(contract="transformer_engine", solved=tmp_path / "a"))
    plan = make_plan(source, Options(solved=tmp_path / "a"))
    (tmp_path / "a" / "model.layers.0.mlp.down_proj.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has changed since the plan was made"):
        run(plan, tmp_path / "d", SMALL)
    with pytest.raises(CheckpointError, match=r"has no codes of model.layers.0.mlp.down_proj.weight"):
        make_plan(source, Options(solved=tmp_path / "a"))
    solve(tmp_path / "b", tensors, "nvfp4", wrong=1.5)
    with pytest.raises(CheckpointError, match="was solved with the amax"):
        run(make_plan(source, Options(solved=tmp_path / "b")), tmp_path / "e", SMALL)
    solve(tmp_path / "f", tensors, "nvfp4", wrong=2.0, headroom=(1.3,))  # then the usual ones are none
    with pytest.raises(CheckpointError, match="and no headroom in common"):
        run(make_plan(source, Options(solved=tmp_path / "f")), tmp_path / "g", SMALL)
    solve(tmp_path / "c", llama(inner=128), "nvfp4")
    with pytest.raises(CheckpointError, match="needs U8 of shape"):
        make_plan(source, Options(solved=tmp_path / "c"))


def test_second_moments_are_made_symmetric() -> None:
    """Whoever wrote them may have rounded the two halves otherwise."""
    moments = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32)
    moments[16:32] = 0
    moments[:, 16:32] = 0
    blocks = np.stack([moments[i : i + 16, i : i + 16] for i in range(0, 64, 16)])
    wanted = (blocks + blocks.transpose(0, 2, 1)) / 2
    wanted[1] = np.eye(16)  # dead inputs
    assert_same_bits(solving._blocks(moments, 16), wanted)
    joined = np.zeros((2, 32, 32), np.float32)
    for i, block in enumerate((blocks + blocks.transpose(0, 2, 1)) / 2):
        joined[i // 2, i % 2 * 16 :, i % 2 * 16 :][:16, :16] = block
    assert_same_bits(solving._joined(blocks, 32), joined)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_block_of_dead_inputs_keeps_its_weights_with_a_diagonal(tmp_path: Path, format: str) -> None:
    """An imatrix, or an expert that saw few tokens, has the diagonal alone."""
    tensors = llama()
    module = "model.layers.0.mlp.down_proj"
    squares = np.linspace(1, 2, tensors[f"{module}.weight"].shape[1], dtype=np.float32)
    squares[32:64] = 0
    known = LinearStatistics(300, squares.size, 4.0, diagonal=squares)
    write_statistics(tmp_path / "stats" / "layer-0.safetensors", {module: known})
    source = write_checkpoint(tmp_path / "s", tensors)
    options = Options(to=format, layout="compressed-tensors", method="hessian", statistics=tmp_path / "stats")
    run(make_plan(source, options), tmp_path / "d", SMALL)
    codes, scales = parts(read_checkpoint(tmp_path / "d"), module, "compressed-tensors", format)
    best = hb.quantize(tensors[f"{module}.weight"].astype(np.float32), format, CONTRACT[format], "optimal")
    block = 16 if format == "nvfp4" else 32
    assert_same_bits(codes[:, 16:32], best.codes[:, 16:32])
    assert_same_bits(scales[:, 32 // block : 64 // block], best.scales[:, 32 // block : 64 // block])
