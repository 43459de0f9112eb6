"""Whole calls on a card: graphs, streams, threads, `out`, given amaxes, the cache on disk. Nothing may wait."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte import online
from halfbyte.arrays import to_numpy
from halfbyte.checkpoint import Options, Rules
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.card.checks import normal, refusal, same

CALLS: list[dict[str, Any]] = [
    {"format": "nvfp4"},
    {"format": "nvfp4", "method": hb.FourSix()},
    {"format": "nvfp4", "method": "optimal"},
    {"format": "nvfp4", "contract": "modelopt", "method": "optimal"},
    {"format": "nvfp4", "contract": "torchao"},
    {"format": "nvfp4", "scaling": "row"},
    {"format": "mxfp4"},
    {"format": "mxfp4", "method": "optimal"},
    {"format": "mxfp8"},
]


@contextmanager
def never_waiting() -> Iterator[None]:
    """A call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def by_reference(x: torch.Tensor, call: dict[str, Any], **more: Any) -> hb.QuantizedTensor:
    return hb.quantize(x.cpu(), **call, **more, backend="reference")


def usual_and_unusual_memory() -> int:
    """Contiguous, strided, shifted by one element, several axes, one row, padded lengths; each twice."""
    done = 0
    for call in CALLS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            whole = normal(12, 272, dtype=dtype)
            pads = call["format"] != "nvfp4"
            shapes = [whole[:, :256], whole.reshape(-1)[: 8 * 256].view(2, 4, 256), whole[3, :256].clone()]
            shapes += [whole[:, 8:264], whole[:, 1:257], whole[:, :256].clone()[::2], whole[:0, :256].clone()]
            for x in (*shapes, *([whole[:, :250]] if pads else [])):
                expected = by_reference(x, call)
                for _ in range(2):
                    got = hb.quantize(x, **call, backend="gpu")
                    done += same(got, expected)
                    decoded = hb.dequantize(got, dtype)
                    assert_same_bits(to_numpy(decoded), to_numpy(hb.dequantize(expected, dtype, backend="reference")))
    return done


def given_amaxes_and_outputs() -> int:
    done = 0
    x, other = normal(16, 512), normal(16, 512, seed=1) * 3
    for call in CALLS:
        out = hb.quantize(other, **call)
        hb.dequantize(out, torch.bfloat16)  # the first call of a kind copies tables to the device
        pointers = [torch.as_tensor(part).data_ptr() for part in (out.codes, out.scales)]
        with never_waiting():
            got = hb.quantize(x, **call, out=out)
            values = torch.empty_like(x)
            hb.dequantize(got, torch.bfloat16, out=values)
        assert got.codes is out.codes
        assert [torch.as_tensor(part).data_ptr() for part in (got.codes, got.scales)] == pointers
        expected = by_reference(x, call)
        done += same(got, expected)
        assert_same_bits(to_numpy(values), to_numpy(hb.dequantize(expected, "bf16", backend="reference")))
        if call["format"] != "nvfp4" or call.get("scaling") == "row":
            continue
        for amax in (0.0, 7.25, 1e-30, 3e38, torch.tensor(7.25, device="cuda"), torch.tensor([7.25], device="cuda")):
            with never_waiting():
                got = hb.quantize(x, **call, global_amax=amax)
            number = amax if isinstance(amax, float) else 7.25
            done += same(got, by_reference(x, call, global_amax=number))
    rows = normal(16, 512).abs().amax(1).float()
    with never_waiting():
        got = hb.quantize(x, "nvfp4", scaling="row", global_amax=rows)
    return done + same(got, hb.quantize(x.cpu(), "nvfp4", scaling="row", global_amax=rows.cpu(), backend="reference"))


def graphs() -> int:
    """Captured calls give new results when they are replayed on new data, beside eager calls on another stream."""
    done = 0
    for call in CALLS:
        x = normal(64, 1024)
        hb.dequantize(hb.quantize(x, **call), torch.bfloat16)  # compile and load before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = hb.quantize(x, **call)
            values = hb.dequantize(q, torch.bfloat16)
        for seed in range(3):
            new = normal(64, 1024, seed=seed) * (seed + 1)
            x.copy_(new)
            graph.replay()
            beside = hb.quantize(new * 5, **call)
            torch.cuda.synchronize()
            expected = by_reference(new, call)
            done += same(q, expected) + same(beside, by_reference(new * 5, call))
            assert_same_bits(to_numpy(values), to_numpy(hb.dequantize(expected, "bf16", backend="reference")))
    return done


def streams_and_threads() -> int:
    """Eight threads, each new to CUDA and with a stream of its own, all at once."""
    inputs = [normal(128, 2048, seed=seed) * (seed + 1) for seed in range(8)]
    expected = {
        (at, index): by_reference(x[:8], call, **_amax(x, call))
        for at, x in enumerate(inputs)
        for index, call in enumerate(CALLS)
        if not _chooses_scale(call)
    }
    alone = {
        (at, index): hb.quantize(x, **call)
        for at, x in enumerate(inputs)
        for index, call in enumerate(CALLS)
        if _chooses_scale(call)
    }
    torch.cuda.synchronize()
    found: dict[tuple[int, int, int], hb.QuantizedTensor] = {}
    problems: list[BaseException] = []

    def work(at: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for turn in range(6):
                    for index, call in enumerate(CALLS):
                        found[at, index, turn] = hb.quantize(inputs[at], **call)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if problems:
        raise problems[0]
    done = 0
    for (at, index, _), got in found.items():
        if CALLS[index].get("scaling") == "row":
            continue
        if _chooses_scale(CALLS[index]):
            done += same(got, alone[at, index])
        else:
            done += same(got, expected[at, index], slice(0, 8))
    return done


def _chooses_scale(call: dict[str, Any]) -> bool:
    """Whether the tensor scale depends on all blocks, so that some rows and the amax do not tell it."""
    return call["format"] == "nvfp4" and call.get("method") == "optimal"


def _amax(x: torch.Tensor, call: dict[str, Any]) -> dict[str, float]:
    one_scale = call["format"] == "nvfp4" and call.get("scaling") != "row"
    return {"global_amax": float(x.abs().max())} if one_scale else {}


def a_first_call_in_a_thread_without_a_context() -> int:
    """cuLaunchKernelEx needs a context, which a new thread does not have."""
    x = normal(16, 256)
    hb.quantize(x, "nvfp4")
    found = []
    thread = threading.Thread(target=lambda: found.append(hb.quantize(x, "nvfp4")))
    thread.start()
    thread.join()
    return same(found[0], by_reference(x, {"format": "nvfp4"}))


SECOND = """
import sys, time
import torch
x = torch.randn(256, 1024, device="cuda").to(torch.bfloat16)
torch.cuda.synchronize()
begun = time.perf_counter()
import halfbyte as hb
for method in ("amax", hb.FourSix(), "optimal"):
    q = hb.quantize(x, "nvfp4", method=method)
hb.dequantize(q, torch.bfloat16)
hb.quantize(x, "mxfp4")
torch.cuda.synchronize()
print(f"{time.perf_counter() - begun:.3f}", "triton" in sys.modules)
"""


def cold_start() -> int:
    """A second process finds the kernels on disk, and does not import Triton."""
    root = Path(__file__).parents[4]
    with tempfile.TemporaryDirectory() as folder:
        setting = os.environ | {"HALFBYTE_CACHE": folder, "PYTHONPATH": f"{root / 'src'}:{root}"}
        said = []
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", SECOND], env=setting, capture_output=True, text=True, cwd=root)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout.split())
        print("first and second process, seconds after importing torch and opening CUDA:", said, flush=True)
        assert said[1][1] == "False", "the second process imported Triton"
        for file in Path(folder).rglob("*.bin"):
            file.write_bytes(file.read_bytes()[:-3])
        done = subprocess.run([sys.executable, "-c", SECOND], env=setting, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[1] == "True", "damaged files were taken for whole ones"
    return 2


def nothing_waits() -> int:
    done = 0
    x = normal(64, 512)
    stack = normal(8 * 32, 256).view(8, 32, 256)
    for call in CALLS:
        hb.dequantize(hb.quantize(x, **call), torch.bfloat16)
    gpu.quantize_experts(stack)
    listed = [part.clone() for part in stack]
    torch.cuda.synchronize()
    with never_waiting():
        for call in CALLS:
            hb.dequantize(hb.quantize(x, **call), torch.bfloat16)
            done += 1
        gpu.quantize_experts(stack)
        gpu.quantize_experts(listed)
        gpu.quantize_experts(listed, shared=True)
    return done + 3


WARM = """
from halfbyte.backends.gpu import build_kernels, usual_calls, visible_architectures
if __name__ == "__main__":
    for architecture in visible_architectures():
        calls = list(usual_calls(architecture, ["nvfp4", "mxfp4"], ["bf16"]))
        for call, compiled, seconds in build_kernels(calls, architecture, 8):
            print(call.title, len(call.kernels), compiled, f"{seconds:.1f} s")
"""


def warmed() -> int:
    """After `halfbyte warm`, the first process that calls finds everything."""
    root = Path(__file__).parents[4]
    with tempfile.TemporaryDirectory() as folder:
        setting = os.environ | {"HALFBYTE_CACHE": f"{folder}/cache", "PYTHONPATH": f"{root / 'src'}:{root}"}
        script = Path(folder) / "warm.py"
        script.write_text(WARM)
        for command in ([sys.executable, str(script)], [sys.executable, "-c", SECOND]):
            done = subprocess.run(command, env=setting, capture_output=True, text=True, cwd=root)
            assert done.returncode == 0, done.stderr
            print(done.stdout, flush=True)
        assert done.stdout.split()[1] == "False", "a kernel of a usual call was not built ahead"
    return 1


def synced() -> int:
    """Weight sync in batches: the bits of the CPU's, nothing waits, NaN is found afterwards."""
    done = 0
    ends = {"gate_proj": (48, 128), "up_proj": (48, 128), "down_proj": (128, 48)}
    modules = [(f"model.layers.0.mlp.experts.{at}.{end}", shape) for at in range(5) for end, shape in ends.items()]
    pairs: list[online.Named] = [
        (f"{module}.weight", normal(*shape, seed=at) * (at + 1)) for at, (module, shape) in enumerate(modules)
    ]
    torch.as_tensor(pairs[2][1]).zero_()
    torch.as_tensor(pairs[5][1]).fill_(1e-38)
    pairs.append(("model.norm.weight", normal(128)))
    heads = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    other: list[online.Named] = [
        (f"model.layers.0.self_attn.{end}.weight", (torch.rand(rows, 128, device="cuda") - 0.5).bfloat16())
        for end, rows in heads.items()
    ]
    unusual = [(name, torch.as_tensor(x).T.contiguous().T) for name, x in other]
    for options in (
        Options(), Options(method="amax"), Options(method="four_six"),
        Options(contract="transformer_engine", method="amax"),
        Options(layout="compressed-tensors", activations="unit"), Options(to="mxfp4", layout="compressed-tensors"),
        Options(contract="compressed_tensors", method="amax", layout="compressed-tensors"),
    ):  # fmt: skip
        config = online.Config(options, "qwen3_moe", 4)
        for given in (pairs, other, unusual):
            online.quantize_named(given, Rules(), config)
            with never_waiting():
                got = dict(online.quantize_named(given, Rules(), config))
            online.check(got.items())
            expected = dict(online.quantize_named([(n, torch.as_tensor(x).cpu()) for n, x in given], Rules(), config))
            assert list(got) == list(expected)
            for name, wanted in expected.items():
                mine = torch.as_tensor(got[name])
                assert mine.shape == wanted.shape, name
                assert mine.dtype == torch.as_tensor(wanted).dtype, name
                assert_same_bits(to_numpy(mine), to_numpy(wanted))
                done += 1
    torch.as_tensor(pairs[4][1])[3, 5] = float("nan")
    named = online.quantize_named(pairs, Rules(), online.Config(Options(), "qwen3_moe", 4))
    message = refusal(lambda: online.check(named))
    assert "experts.1" in message, message
    return done + 1


CHECKS: dict[str, Callable[[], int]] = {
    "memory of calls": usual_and_unusual_memory,
    "amaxes and outputs": given_amaxes_and_outputs,
    "graphs of calls": graphs,
    "streams and threads": streams_and_threads,
    "a new thread": a_first_call_in_a_thread_without_a_context,
    "cold start": cold_start,
    "warmed": warmed,
    "weight sync": synced,
    "nothing waits": nothing_waits,
}
