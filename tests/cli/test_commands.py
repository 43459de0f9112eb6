"""The command: exit codes, the last line, the JSON; a wrong bit is noticed."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from halfbyte.backends.cpu.backend import Cpu
from halfbyte.cli import app
from halfbyte.contracts import CONTRACTS

VECTORS = Path(__file__).parents[2] / "conformance" / "vectors.zip"
CASES = [
    "torchao/nvfp4_twolevel_gauss_fp32_16x96_s1300",
    "gguf/mxfp4_heavy_fp32_8x128_s1501",
    "transformer_engine/mxfp4_heavy_fp32_8x128_s601",
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """A directory with three cases of the golden vectors, float32 so that safetensors.numpy can rewrite them."""
    with zipfile.ZipFile(VECTORS) as archive:
        index = json.loads(archive.read("index.json"))
        for name in CASES:
            archive.extract(f"{name}.safetensors", tmp_path)
    index["cases"] = [entry for entry in index["cases"] if entry["name"] in CASES]
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


def edit_index(vectors: Path, **changes: Any) -> None:
    """Change the first case of the index."""
    index = json.loads((vectors / "index.json").read_text())
    index["cases"][0] |= changes
    (vectors / "index.json").write_text(json.dumps(index))


def test_all_golden_cases_agree() -> None:
    result = run("conform", VECTORS)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "743 of 743 cases agree bit for bit"


def test_directory_of_vectors(vectors: Path) -> None:
    result = run("conform", vectors)
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "3 of 3 cases agree bit for bit")


@pytest.mark.parametrize("bit", range(8))
def test_one_flipped_bit_is_seen_and_shown(vectors: Path, bit: int) -> None:
    path = vectors / f"{CASES[0]}.safetensors"
    tensors = load_file(path)
    tensors["codes"] = tensors["codes"].copy()
    tensors["codes"][3, 10] ^= 1 << bit
    save_file(tensors, path)
    result = run("conform", vectors)
    assert result.exit_code == 1
    assert "2 of 3 cases agree bit for bit" in result.output
    assert "codes: 1 of 768 elements differ, first at (3, 10)" in result.output
    assert "block 1 of row 3" in result.output
    inputs = tensors["input"][3, 16:32].view(np.uint32)
    assert " ".join(f"0x{value:08x}" for value in inputs) in result.output


def test_unstable_tensors_are_left_out(vectors: Path) -> None:
    path = vectors / f"{CASES[0]}.safetensors"
    tensors = load_file(path)
    tensors["codes"] = ~tensors["codes"]
    save_file(tensors, path)
    index = json.loads((vectors / "index.json").read_text())
    for entry in index["cases"]:
        entry["unstable"] = ["codes"] if entry["name"] == CASES[0] else []
    (vectors / "index.json").write_text(json.dumps(index))
    assert run("conform", vectors).exit_code == 0


def test_unknown_peer_counts_as_differ(vectors: Path) -> None:
    edit_index(vectors, peer="cutlass")
    result = run("conform", vectors, "--allow-pending")
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "2 of 3 cases agree bit for bit")
    assert "unknown peer 'cutlass'" in result.output


def test_unknown_config_key_counts_as_differ(vectors: Path) -> None:
    edit_index(vectors, config={"mode": "mxfp4", "stochastic": True})
    result = run("conform", vectors)
    assert result.exit_code == 1
    assert "unknown option of gguf 'stochastic'; known: mode" in result.output


def test_unknown_output_counts_as_differ(vectors: Path) -> None:
    path = vectors / f"{CASES[0]}.safetensors"
    save_file(load_file(path) | {"surprise": np.zeros(3, np.float32)}, path)
    result = run("conform", vectors)
    assert result.exit_code == 1
    assert "surprise: not an output that halfbyte rebuilds for torchao" in result.output


def test_operands_that_do_not_fit_count_as_differ_and_stop_nothing(vectors: Path) -> None:
    path = vectors / f"{CASES[1]}.safetensors"
    tensors = load_file(path)
    tensors["input"] = tensors["input"][:, :31].copy()
    save_file(tensors, path)
    result = run("conform", vectors)
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "2 of 3 cases agree bit for bit")
    assert "InputError" in result.output


def test_missing_case_file_counts_as_differ(vectors: Path) -> None:
    (vectors / f"{CASES[2]}.safetensors").unlink()
    result = run("conform", vectors)
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "2 of 3 cases agree bit for bit")


def test_truncated_case_file_counts_as_differ(vectors: Path) -> None:
    path = vectors / f"{CASES[2]}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert run("conform", vectors).output.splitlines()[-1] == "2 of 3 cases agree bit for bit"


def test_no_cases_prove_nothing(vectors: Path) -> None:
    (vectors / "index.json").write_text('{"cases": []}')
    result = run("conform", vectors, "--allow-pending")
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "0 of 0 cases agree bit for bit")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"cases": [{"name": "x"}]}', '{"cases": 3}'])
def test_unreadable_index_is_exit_code_2(vectors: Path, content: str | None) -> None:
    (vectors / "index.json").unlink()
    if content is not None:
        (vectors / "index.json").write_text(content)
    result = run("conform", vectors)
    assert result.exit_code == 2
    assert "index.json" in result.output


def test_a_path_that_is_no_vectors_is_exit_code_2(tmp_path: Path) -> None:
    result = run("conform", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "neither a directory of vectors nor a zip archive" in result.output


def test_unknown_backend_is_exit_code_2(vectors: Path) -> None:
    result = run("conform", vectors, "--backend", "abacus")
    assert result.exit_code == 2
    assert "unknown backend 'abacus'; known: auto, cpu, gpu, reference" in result.output


def test_a_case_without_a_kernel_is_pending_not_different(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "supports", lambda backend, request: "it has no kernel")
    result = run("conform", vectors, "--backend", "cpu")
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "0 of 3 cases agree bit for bit")
    assert "pending: 3 backend cpu cannot do this: it has no kernel" in result.output
    assert run("conform", vectors, "--backend", "cpu", "--allow-pending").exit_code == 0


def test_json_says_the_same(vectors: Path, tmp_path: Path) -> None:
    edit_index(vectors, peer="cutlass")
    run("conform", vectors, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["cases"], report["agree"], report["differ"], report["pending"]) == (3, 2, 1, 0)
    assert report["summary"] == "2 of 3 cases agree bit for bit"
    assert report["peers"]["cutlass"] == {"agree": 0, "differ": 1, "pending": 0}
    assert {result["name"]: result["status"] for result in report["results"]}[CASES[0]] == "agree"


def test_zip_and_directory_are_read_alike(vectors: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path.parent / "copy"), "zip", vectors)
    assert run("conform", archive).output == run("conform", vectors).output


def test_contracts_lists_every_contract() -> None:
    output = run("contracts").output
    assert all(name in output for name in CONTRACTS)


@pytest.mark.parametrize("name", CONTRACTS)
def test_contracts_shows_one_with_its_options(name: str) -> None:
    result = run("contracts", name)
    assert result.exit_code == 0
    assert CONTRACTS[name]().source in result.output
    assert all(option in result.output for option in CONTRACTS[name].__kwdefaults__ or {})


def test_contracts_refuses_an_unknown_name() -> None:
    result = run("contracts", "cutlass")
    assert (result.exit_code, "known: compressed_tensors" in result.output) == (2, True)


def test_version() -> None:
    from halfbyte import __version__

    assert run("--version").output == f"halfbyte {__version__}\n"
