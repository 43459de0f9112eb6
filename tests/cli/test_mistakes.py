"""Mistakes on the command line: each ends in one sentence that says what to do, never in a traceback."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from halfbyte.backends.gpu import warm
from halfbyte.cli import app
from halfbyte.errors import UnsupportedError
from tests.cli.test_commands import VECTORS
from tests.tiny_models import make, write_safetensors


def refused(*arguments: object) -> str:
    """The one line of a command that is refused."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output.strip().splitlines()[-1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "source")


def test_options_that_would_do_nothing(source: Path) -> None:
    tokens = source.with_name("t.npy")
    np.save(tokens, np.arange(100))
    run = "belongs to a run of the model: leave it out with --merge"
    for arguments, message in (
        (("convert", source, "d", "--windows", 3), "--windows belongs to --calibrate FILE"),
        (("convert", source, "d", "--length", 9), "--length belongs to --calibrate FILE"),
        (("verify", source, "--trust-remote-code"), "--trust-remote-code belongs to --load"),
        (("calibrate", source, "-o", "s", "--tokens", tokens, "--parts", 2), "--parts belongs to --engine ray"),
        (
            ("calibrate", source, "-o", "s", "--tokens", tokens, "--engine", "ray", "--device", "cpu"),
            "--device belongs to --engine local; use --num-gpus-per-task",
        ),
        (("calibrate", "--merge", "a", "-o", "s", "--moments", "blocks"), f"--moments {run}"),
        (("calibrate", "--merge", "a", "-o", "s", "--skip", 0), f"--skip {run}"),
        (("study", "--sample", 99), "--sample belongs to --methods"),
        (
            ("study", "--methods", "--weights", source, "--scenario", "conv"),
            "--scenario and --weights name two things to study; give one of them",
        ),
    ):
        assert refused(*arguments) == f"halfbyte {arguments[0]}: {message}"


def test_files_that_cannot_be_written_are_found_before_the_work(source: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "t.npy"  # is not there: nothing gets as far as reading it
    absent = tmp_path / "no" / "f.json"
    for arguments in (
        ("convert", source, tmp_path / "d", "--json"),
        ("verify", source, "--against", source, "--json"),
        ("calibrate", source, "-o", tmp_path / "s", "--tokens", tokens, "--json"),
        ("eval", source, "--against", source, "--tokens", tokens, "--json"),
        ("conform", VECTORS, "--json"),
        ("study", "--json"),
        ("study", "--csv"),
        ("study", "--html"),
    ):
        told = f"{absent} cannot be written: there is no folder {absent.parent}; make it first"
        assert refused(*arguments, absent) == f"halfbyte {arguments[0]}: {told}"
        assert refused(*arguments, tmp_path) == f"halfbyte {arguments[0]}: {tmp_path} cannot be written: Is a directory"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("arguments", [("convert", "", "d"), ("convert", "s", ""), ("verify", ""), ("inspect", "")])
def test_an_empty_argument_is_not_the_current_folder(arguments: tuple[str, ...]) -> None:
    assert refused(*arguments) == "Error: Invalid value: an argument is empty; is a variable of the shell not set?"


def test_an_empty_layout_is_no_default(source: Path, tmp_path: Path) -> None:
    assert "unknown layout ''; known: " in refused("convert", source, tmp_path / "d", "--layout", "")


@pytest.mark.parametrize("arguments", [["-h"], ["convert", "-h"], ["verify", "-h"]])
def test_help_has_a_short_form(arguments: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*arguments[:-1], help]).output for help in ("-h", "--help"))
    assert short == long
    assert short.startswith("Usage: ")


def test_links_in_a_circle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for pair in ((source, tmp_path / "loop"), (tmp_path / "loop", tmp_path / "d")):
        assert "loop is no path that can be followed" in refused("convert", *pair)


def test_a_path_that_is_too_long(source: Path) -> None:
    name = "x" * 300
    assert refused("verify", name) == f"halfbyte verify: {name}: File name too long"
    assert refused("convert", name, "d") == f"halfbyte convert: {name}: File name too long"


def test_numbers_of_thousands_of_digits(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(f'{{"hidden_size": {"9" * 5000}}}')
    assert "config.json: cannot be read as JSON: " in refused("convert", source, tmp_path / "d")
    header = f'{{"a": {{"dtype": "BF16", "shape": [{"9" * 5000}], "data_offsets": [0, 2]}}}}'.encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert "a.safetensors: the header is no JSON" in refused("inspect", tmp_path / "a.safetensors")


def test_a_damaged_archive_of_vectors(tmp_path: Path) -> None:
    data = VECTORS.read_bytes()
    whole = tmp_path / "whole.zip"
    with zipfile.ZipFile(VECTORS) as archive:
        at = archive.getinfo("index.json").header_offset
    whole.write_bytes(data[: at + 100] + bytes(200) + data[at + 300 :])
    assert refused("conform", whole).endswith("; fetch it again")
    assert "index.json cannot be read: " in refused("conform", whole)
    end = data.rindex(b"PK\x05\x06")
    whole.write_bytes(data[end - 1000 :])  # the end of an archive, whose directory is cut
    assert "cannot be read as a zip archive: " in refused("conform", whole)


def test_a_folder_that_is_no_vectors(source: Path) -> None:
    told = f"{source} holds no index.json: not a folder of vectors, or a part is missing"
    assert refused("conform", source) == f"halfbyte conform: {told}"


def test_a_text_in_place_of_tokens(source: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("hello")
    arguments = ("calibrate", source, "-o", tmp_path / "s", "--tokens", tmp_path / "words.txt")
    told = "words.txt: cannot be read as .npy of integers; name plain files of tokens .u16 or .u32"
    assert refused(*arguments) == f"halfbyte calibrate: {tmp_path}/{told}"


def test_a_folder_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    import torch  # noqa: F401  # a run of the model asks for it first

    np.save(tmp_path / "t.npy", np.arange(100))
    arguments = ("calibrate", source, "-o", tmp_path / "t.npy" / "s", "--tokens", tmp_path / "t.npy", "--length", 20)
    assert refused(*arguments) == f"halfbyte calibrate: {tmp_path / 't.npy' / 's'}: Not a directory"


def test_a_name_that_no_tensor_has(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"one": np.zeros(4, np.float32)})
    done = CliRunner().invoke(
        app, ["inspect", str(tmp_path / "a.safetensors"), "--match", "[two", "--json", str(tmp_path / "j")]
    )
    assert (done.exit_code, done.output) == (0, "no tensor's name contains '[two'\n")
    assert json.loads((tmp_path / "j").read_text())["tensors"] == 0


class _Dies:
    """A kernel whose compiler ends its process, as LLVM does with what it does not know."""

    def is_cached(self, architecture: str) -> bool:
        return False

    def image(self, architecture: str) -> Iterator[None]:
        os._exit(1)


def test_a_compiler_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    call = warm.Usual("a call", (_Dies(),))  # type: ignore[arg-type]
    with pytest.raises(
        UnsupportedError, match=r"died while it compiled kernels for sm_9000: .*\(then give fewer --jobs\)"
    ):
        list(warm.build([call], "sm_9000", 1))
