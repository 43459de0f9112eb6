"""Files beside the shards: copied, left out with a reason, or broken and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import llama, random, safetensors_bytes, write_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
WEIGHTS = safetensors_bytes({"linear.weight": random(0, 4, 4)})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama())


def put(folder: Path, name: str, data: bytes = b"{}") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "2_Dense/model.safetensors",
        "vision-lora/adapter_model.safetensors",
        "speech-lora/adapter_config.json",
        "parts/model.safetensors.index.json",
        "a/b/c.safetensors",
        "modeling_x.py",
        "spk_dict.pt",
    ],
)
def test_what_a_loader_reads_is_copied(tmp_path: Path, source: Path, name: str) -> None:
    put(source, name, WEIGHTS)
    plan = make_plan(source, Options(method="amax"))
    assert (name in plan.side_files, dict(plan.left_out)) == (True, {})
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    assert (tmp_path / "d" / name).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.onnx_data",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "onnx/config.json",
        "onnx/model.safetensors",
        "openvino/openvino_model.xml",
        "openvino_model.xml",
        "tf_model.h5",
        "tf_model.h5.index.json",
        "flax_model.msgpack",
        "original/consolidated.safetensors",
        "quantized/model-q4.gguf",
        "2_Dense/pytorch_model.bin",
        "2_Dense/onnx/model.safetensors",
    ],
)
def test_other_forms_of_the_model_are_left_out_and_listed(source: Path, name: str) -> None:
    put(source, name)
    checkpoint = open_checkpoint(source)
    assert checkpoint.left_out == {name: "the model in another form"}
    assert checkpoint.side_files == ("tokenizer.json",)


@pytest.mark.parametrize(
    "folder",
    ["original", "metal", "onnx", "openvino", "coreml", "gguf", "ggml", "tflite", "tensorrt", "tf", "flax", "ONNX"],
)
def test_folders_of_other_forms_are_left_out_whole(source: Path, folder: str) -> None:
    put(source, f"{folder}/deep/config.json")
    put(source, f"my_{folder}/config.json")
    checkpoint = open_checkpoint(source)
    assert checkpoint.left_out == {f"{folder}/deep/config.json": "the model in another form"}
    assert f"my_{folder}/config.json" in checkpoint.side_files


@pytest.mark.parametrize("name", [".git", ".cache", ".gitattributes", ".halfbyte"])
def test_version_control_and_caches_are_never_copied(source: Path, name: str) -> None:
    put(source, name)
    put(source, f"2_Dense/{name}/refs.json")
    checkpoint = open_checkpoint(source)
    assert checkpoint.left_out == dict.fromkeys((name, f"2_Dense/{name}"), "not read by loaders")
    assert checkpoint.side_files == ("tokenizer.json",)


@pytest.mark.parametrize(
    ("suffix", "copied"), [("bin", 1), ("pt", 1), ("pth", 1), ("ckpt", 1), ("pkl", 1), ("onnx", 0)]
)
def test_pickles_of_an_adapter_are_copied_whatever_their_ending(source: Path, suffix: str, copied: bool) -> None:
    put(source, "lora/adapter_config.json")
    put(source, f"lora/adapter_model.{suffix}")
    assert (f"lora/adapter_model.{suffix}" in open_checkpoint(source).side_files) is bool(copied)


def test_a_pickle_that_is_the_only_form_of_a_part_is_copied(source: Path) -> None:
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}, {"idx": 2, "path": "3_Dense"}]
    put(source, "modules.json", json.dumps(modules).encode())
    for name in ("2_Dense/pytorch_model.bin", "3_Dense/pytorch_model.bin", "3_Dense/model.safetensors", "x/model.bin"):
        put(source, name)
    put(source, "lora/adapter_config.json")
    put(source, "lora/adapter_model.bin")
    checkpoint = open_checkpoint(source)
    assert {"2_Dense/pytorch_model.bin", "3_Dense/model.safetensors", "lora/adapter_model.bin"} <= set(
        checkpoint.side_files
    )
    assert set(checkpoint.left_out) == {"3_Dense/pytorch_model.bin", "x/model.bin"}


@pytest.mark.parametrize("text", ["{", "3", '["a"]'])
def test_a_list_of_parts_that_is_none(source: Path, text: str) -> None:
    put(source, "modules.json", text.encode())
    put(source, "2_Dense/pytorch_model.bin")
    assert set(open_checkpoint(source).left_out) == {"2_Dense/pytorch_model.bin"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer.model", "2_Dense/model.safetensors"]
)
def test_a_git_lfs_pointer_is_named_as_such(source: Path, name: str) -> None:
    put(source, name, POINTER.encode())
    with pytest.raises(CheckpointError, match=f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`"):
        make_plan(source, Options())


def test_a_pointer_that_is_not_needed_stops_nothing(source: Path) -> None:
    put(source, "pytorch_model.bin", POINTER.encode())
    assert open_checkpoint(source).left_out == {"pytorch_model.bin": "the model in another form"}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", "2_Dense/model.safetensors"])
def test_a_link_to_nothing_is_refused(source: Path, name: str) -> None:
    (source / name).unlink(missing_ok=True)
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).symlink_to("../blobs/0815")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to \.\./blobs/0815, which is not there; fetch"):
        make_plan(source, Options())


def test_links_to_nothing_among_shards_and_in_place_of_the_index(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "two", llama(), shards=2)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (source / name).unlink()
        (source / name).symlink_to("gone")
        with pytest.raises(CheckpointError, match=f"{name} is a link to gone, which is not there"):
            make_plan(source, Options())


def test_links_and_pointers_that_are_not_copied_stop_nothing(source: Path) -> None:
    (source / "pytorch_model.bin").symlink_to("gone")
    assert set(open_checkpoint(source).left_out) == {"pytorch_model.bin"}
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("gone")
    put(source, "vocab.txt", POINTER.encode())
    looked_at = open_checkpoint(source, need_config=False)
    assert looked_at.left_out["tokenizer.json"] == "a link to nothing"
    assert looked_at.left_out["vocab.txt"] == "a Git LFS pointer"
