"""The CPU benchmark: it runs, it writes its report, and it notices a wrong bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from benchmarks import cpu, operations, peers
from benchmarks.machine import Array, Timed, instruction_sets, kept_settings, run_rounds

ROOT = Path(__file__).parents[1]
TINY = ["--quick", "--rows", "64", "--columns", "256", "--no-peers", "--sizes", "1,2", "--memory", "fresh"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("benchmark") / "cpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), *TINY, "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "what was timed equals the reference's" in run.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_machine_and_versions_are_told(report: dict[str, Any]) -> None:
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["copy_gb_s"] > 0
    assert "-ffp-contract=off" in report["versions"]["compiler flags"]
    assert report["versions"]["halfbyte"].startswith(hb.__version__)
    assert set(report["load"]) == {"start", "end"}


def test_every_operation_is_timed_on_every_instruction_set_and_thread_count(report: dict[str, Any]) -> None:
    settings, records = report["settings"], report["operations"]
    inputs = operations.make_inputs(64, 256, "bf16", 1)
    for operation in operations.make_operations(inputs):
        found = {(r["isa"], r["threads"]) for r in records if r["name"] == operation.name}
        isas = settings["isas"] if operation.ours else [operations.ANY]
        assert found == {(isa, threads) for isa in isas for threads in (1, 2)}, operation.name
    for record in records:
        assert record["bits"] == "equal"
        assert record["calls"] >= cpu.QUICK.rounds[0]
        assert 0 < record["best_s"] <= record["median_s"]
        assert record["gb_s"] == pytest.approx(64 * 256 * 2 / record["best_s"] / 1e9)
        copy = next(r for r in records if r["name"] == "memcpy" and r["threads"] == record["threads"])
        assert record["x_memcpy"] == pytest.approx(record["gb_s"] / copy["gb_s"])


def test_scaling_tells_sizes_and_threads(report: dict[str, Any]) -> None:
    scaling = report["scaling"]
    assert [size["megabytes"] for size in scaling["sizes"]] == [1, 2]
    assert scaling["sizes"][0]["x_first"] == 1
    names = {record["name"] for record in scaling["two_threads"]}
    assert {"4over6 MAE strict", "Optimal", "Hessian"} <= names
    assert "memcpy" not in names
    assert scaling["call_us"]["Optimal"] > 0


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("where", [0, -1])
def test_a_wrong_bit_fails_the_run(
    part: str, where: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = hb.quantize

    def wrong(x: Array, format: str, **options: Any) -> hb.QuantizedTensor:
        q = right(x, format, **options)
        if options.get("backend") == "cpu" and isinstance(options.get("method"), hb.Optimal):
            np.asarray(getattr(q, part)).reshape(-1)[where] ^= 1
        return q

    monkeypatch.setattr(hb, "quantize", wrong)
    path = tmp_path / "cpu.json"
    status = cpu.main([*TINY, "--no-scaling", "--only", "optimal", "--seconds", "0.01", "--json", str(path)])
    assert status == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"WRONG BITS: Optimal, {instruction_sets(['avx2'])[0]}, 1 threads: {part}: 1 of" in printed
    report = json.loads(path.read_text())
    bits = {(record["name"].split(",")[0], record["bits"]) for record in report["operations"]}
    assert bits == {("memcpy", "equal"), ("Optimal", "differ")}
    assert report["bits"]["differences"]


def test_a_variant_that_differs_only_between_the_compared_rows_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = hb.quantize

    def wrong(x: Array, format: str, **options: Any) -> hb.QuantizedTensor:
        q = right(x, format, **options)
        if options.get("threads") == 2:
            np.asarray(q.codes)[len(q.codes) // 2, 0] ^= 1
        return q

    monkeypatch.setattr(hb, "quantize", wrong)
    arguments = ["--quick", "--rows", "128", "--columns", "64", "--no-peers", "--no-scaling", "--memory", "fresh"]
    assert cpu.main([*arguments, "--only", "transformer_engine", "--seconds", "0.01"]) == 1
    assert "2 threads differs from the first variant" in capsys.readouterr().out


@kept_settings()
def test_a_peer_with_other_bits_fails() -> None:
    pytest.importorskip("torch")
    inputs = operations.make_inputs(16, 64, "bf16", 1)

    def quantize(x: Array) -> hb.QuantizedTensor:
        return hb.quantize(x, "nvfp4", global_amax=inputs.amax)

    def pair(flip: int) -> peers.Pair:
        def peer(x: object) -> tuple[Array, Array]:
            q = quantize(inputs.x)
            return np.asarray(q.codes) ^ np.uint8(flip), np.asarray(q.scales)

        return peers.Pair(
            "fake", "numpy", peers.LEFT_OUT, ("plain",), lambda x, threads: quantize(x), peer,
            peers._codes_and_scales(lambda result: result),
        )  # fmt: skip

    isas = instruction_sets(["avx2"])
    (same,), nothing = cpu.time_peers(inputs, [pair(0)], isas, 1, 16, 0)
    assert (same["bits"], nothing) == ("equal", [])
    assert same["ours"][isas[0]]["ratio"] > 0
    (other,), found = cpu.time_peers(inputs, [pair(1)], isas, 1, 16, 0)
    assert other["bits"] == "differ"
    assert found[0].startswith(f"fake, {isas[0]}: codes: 512 of 512 elements differ")


def test_rounds_interleave_and_buffers_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    timed = [Timed(lambda buffer, name=name: calls.append((name, buffer))) for name in "abc"]  # type: ignore[misc]
    assert run_rounds(timed, 2, 0, (4, 9)) == 4
    assert [buffer for _, buffer in calls] == [0, 1] * 6
    rounds = ["".join(name for name, _ in calls[i : i + 3]) for i in range(0, 12, 3)]
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert len(set(rounds)) > 1
    assert [len(one.times) for one in timed] == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rows", "17"], "multiple of 16"),
        (["--columns", "33"], "of 32"),
        (["--threads", "2"], "must include 1"),
        (["--isa", "neon"], "knows portable, avx2, avx512"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cpu.main(arguments)
    assert reason in capsys.readouterr().err


# --- whole calls ---


def test_whole_calls_are_timed_and_compared() -> None:
    pytest.importorskip("torch")
    from benchmarks import calls_cpu

    rows = calls_cpu.measure([(16, 32)], 0.0, peers=False)
    assert rows[0].name == calls_cpu.MEASURE
    assert rows[0].against_torch == 1
    assert {row.bits for row in rows[1:]} == {"equal"}
    assert len(rows) >= 2 * len(calls_cpu.quantizers())
    assert all(row.best_s > 0 for row in rows)
    assert all(row.name in calls_cpu.table(rows) for row in rows)


def test_a_wrong_result_of_a_whole_call_is_noticed() -> None:
    pytest.importorskip("torch")
    from benchmarks import calls_cpu

    (right, *_) = calls_cpu.our_calls(calls_cpu._tensors(16, 32))

    def wrong(turn: int) -> Any:
        q = right.run(turn)
        q.codes[3, 5] ^= 1
        return q

    assert calls_cpu._bits(right) == "equal"
    assert calls_cpu._bits(calls_cpu.Call("wrong", wrong, right.is_right)) == "DIFFERENT"


def test_verify_is_timed_beside_convert_and_sha256sum(tmp_path: Path) -> None:
    from benchmarks import verify

    found = verify.measure(tmp_path, shards=2, experts=1, rounds=1, hidden=64, inner=128)
    assert found["clean"]
    names = {"convert, amax", "verify, amax", "convert, optimal", "verify, optimal", "hash pass", "sha256sum"}
    assert set(found["rows"]) == names
    assert all(row["best_s"] > 0 and row["gb_s"] > 0 for row in found["rows"].values())
    assert set(found["verify_against_convert"]) == {"amax", "optimal"}
