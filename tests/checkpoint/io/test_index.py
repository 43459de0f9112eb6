"""Directories that are no checkpoints, each refused by name before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.io.index import open_checkpoint, read_json
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import Array, llama, random, safetensors_bytes, write_checkpoint

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama(), shards=2)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        make_plan(folder, Options())
    assert message in str(caught.value)


def test_a_checkpoint_is_opened(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    assert set(checkpoint.tensors) == set(llama())
    assert checkpoint.side_files == ("tokenizer.json",)
    assert len(checkpoint.headers) == 2


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "none", "is not there")


def test_an_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, "holds no safetensors file: not a checkpoint")


def test_a_file_instead_of_a_directory(source: Path) -> None:
    refused(source / FIRST, "is a file; give the directory")


def test_no_config(source: Path) -> None:
    (source / "config.json").unlink()
    refused(source, "holds no config.json: not a Hugging Face checkpoint")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[]", "expected a JSON object, got list")]
)
def test_a_broken_config(source: Path, text: str, message: str) -> None:
    (source / "config.json").write_text(text)
    refused(source, message)


def test_pickle_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    refused(tmp_path, "holds only pickle files (pytorch_model.bin)")


def test_a_pickle_named_safetensors(source: Path) -> None:
    (source / FIRST).write_bytes(b"PK\3\4" + bytes(64))
    refused(source, "is a pickle")


def test_a_truncated_shard(source: Path) -> None:
    raw = (source / FIRST).read_bytes()
    (source / FIRST).write_bytes(raw[:-100])
    refused(source, "it is truncated")


def test_a_shard_that_is_not_there(source: Path) -> None:
    (source / FIRST).unlink()
    refused(source, f"names {FIRST}, which is not there")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", ".."])
def test_an_index_that_points_outside(source: Path, name: str) -> None:
    change_index(source, lambda weights: weights.update({"lm_head.weight": name}))
    refused(source, "outside the directory")


def test_an_index_that_names_another_kind_of_file(source: Path) -> None:
    change_index(source, lambda weights: weights.update({"lm_head.weight": "tokenizer.json"}))
    refused(source, "which is no safetensors file")


def test_an_index_without_a_map(source: Path) -> None:
    (source / INDEX).write_text("{}")
    refused(source, "weight_map is missing or empty")


def test_an_index_that_lacks_a_tensor(source: Path) -> None:
    change_index(source, lambda weights: weights.pop("lm_head.weight"))
    refused(source, f"holds tensor lm_head.weight, but {INDEX} does not name it")


def test_an_index_that_names_a_tensor_too_many(source: Path) -> None:
    change_index(source, lambda weights: weights.update({"ghost.weight": FIRST}))
    refused(source, f"puts ghost.weight into {FIRST}, where it is not")


def test_an_index_that_names_the_wrong_shard(source: Path) -> None:
    second = FIRST.replace("00001-of", "00002-of")
    change_index(source, lambda weights: weights.update({name: second for name in weights if weights[name] == FIRST}))
    (source / second).write_bytes((source / second).read_bytes())
    refused(source, "where it is not")


def test_a_tensor_in_two_shards(source: Path) -> None:
    second = source / FIRST.replace("00001-of", "00002-of")
    tensors = {name: x for number, (name, x) in enumerate(llama().items()) if number % 2}
    second.write_bytes(safetensors_bytes(tensors | {"model.embed_tokens.weight": random(0, 4, 4)}))
    refused(source, f"tensor model.embed_tokens.weight is in both {FIRST} and {second.name}")


def test_several_files_without_an_index(source: Path) -> None:
    (source / INDEX).unlink()
    refused(source, "holds 2 safetensors files but no model.safetensors.index.json")


def test_one_file_of_any_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", llama())
    shutil.move(folder / "model.safetensors", folder / "weights.safetensors")
    plan = make_plan(folder, Options())
    assert [shard.name for shard in plan.shards] == ["weights.safetensors"]
    assert INDEX in plan.json_files  # loaders look for model.safetensors or an index


def test_a_dtype_that_no_reader_knows(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.0.mlp.extra.weight": np.ones((4, 16), np.int32)}
    refused(write_checkpoint(tmp_path / "source", tensors), "is a weight in a form that no reader knows")


def test_packed_weights_of_another_format(tmp_path: Path) -> None:
    packed: dict[str, Array] = {
        "a.weight_packed": np.ones((4, 4), np.int64),
        "a.weight_scale": np.ones((4, 1), np.float32),
    }
    refused(write_checkpoint(tmp_path / "source", packed), "I64 of shape [4, 4] is a weight in a form that")


def test_a_quantizer_that_no_reader_knows(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq"}}
    refused(write_checkpoint(tmp_path / "source", llama(), config), "quantized by 'gptq', which no reader knows")


def test_side_files_and_what_is_left_out(source: Path) -> None:
    (source / "model.gguf").write_bytes(b"x")
    (source / "consolidated.safetensors").write_bytes(safetensors_bytes({"a": random(0, 2, 2)}))
    (source / ".git").mkdir()
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "1_Pooling" / "model.bin").write_bytes(b"x")
    checkpoint = open_checkpoint(source)
    assert checkpoint.side_files == ("1_Pooling/config.json", "tokenizer.json")
    assert set(checkpoint.left_out) == {"model.gguf", "consolidated.safetensors", ".git", "1_Pooling/model.bin"}
    assert checkpoint.left_out["consolidated.safetensors"] == "no shard of this checkpoint"


def test_folders_behind_links_are_left_out_and_files_are_not(tmp_path: Path, source: Path) -> None:
    """A cache of downloads links each file to its blob; a link to a folder could bring anything along."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("x")
    (source / "extra").symlink_to(tmp_path / "outside")
    (source / "again").symlink_to(source)
    (source / "chat_template.jinja").symlink_to(tmp_path / "outside" / "secret.txt")
    checkpoint = open_checkpoint(source)
    assert checkpoint.side_files == ("chat_template.jinja", "tokenizer.json")
    assert checkpoint.left_out == dict.fromkeys(("again", "extra"), "a link to a folder")


def test_a_config_that_is_no_unicode_text(source: Path) -> None:
    """It could not be written at the end, when all the work is done."""
    (source / "config.json").write_text('{"model_type": "llama", "note": "\\uD83D"}')
    refused(source, "holds half of a surrogate pair")
    (source / "config.json").write_text('{"model_type": "llama", "note": "\\uD83D\\uDE00"}')
    assert make_plan(source, Options()).json_files["config.json"]["note"] == "\U0001f600"


@pytest.mark.parametrize("layers", [True, -5, 0, "2", 2.0])
def test_a_number_of_layers_that_is_none(tmp_path: Path, layers: object) -> None:
    folder = write_checkpoint(tmp_path / "source", llama(), {"num_hidden_layers": layers})
    assert set(make_plan(folder, Options()).kept.values()) == {"embedding", "output head"}


def test_side_files_whose_names_are_no_text(tmp_path: Path, source: Path) -> None:
    """No manifest could name them."""
    (source / "folder").mkdir()
    for name in (b"bad\xff.txt", b"bad\xff.bin", b"folder/bad\xff.txt"):
        Path(os.fsdecode(bytes(source) + b"/" + name)).write_text("x")
    plan = make_plan(source, Options(method="amax"))
    assert plan.side_files == ("tokenizer.json",)
    assert sorted(plan.left_out) == ["'bad\\udcff.bin'", "'bad\\udcff.txt'", "'folder/bad\\udcff.txt'"]
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    assert (tmp_path / "d" / "halfbyte.json").is_file()


def said(path: Path, need_config: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, need_config)
    return str(caught.value)


def test_whole_messages(tmp_path: Path) -> None:
    path = tmp_path / "m"
    assert said(path) == f"{path} is not there, or is no directory; give the folder of a downloaded checkpoint"
    path.mkdir()
    assert said(path) == f"{path} holds no safetensors file: not a checkpoint"
    for name in ("b.pt", "a.bin"):
        (path / name).write_bytes(b"")
        assert (
            said(path) == f"{path} holds only pickle files ({name}), which can run code; save it as safetensors first"
        )
    for name in ("x.safetensors", "y.safetensors"):
        (path / name).write_bytes(safetensors_bytes({f"{name}.weight": random(0, 2, 2)}))
    (path / "z.safetensors").write_bytes(safetensors_bytes({}))
    assert said(path) == f"{path} holds 3 safetensors files but no {INDEX} that says which belong to the model"
    assert said(path / "x.safetensors") == (
        f"{path}/x.safetensors is a file; give the directory that holds it and config.json"
    )
    (path / INDEX).write_text('{"weight_map": {"a": 3}}')
    assert said(path) == f"{path}/{INDEX}: a is said to be in 3, outside the directory"
    (path / INDEX).write_text('{"weight_map": {"a": "w.safetensors"}}')
    assert said(path) == f"{path}/{INDEX} names w.safetensors, which is not there; fetch the missing shard"
    (path / INDEX).write_text('{"weight_map": {"a": "a.bin"}}')
    assert said(path) == f"{path}/{INDEX} names a.bin, which is no safetensors file"
    (path / INDEX).write_text('{"weight_map": {"a": "z.safetensors"}}')
    assert said(path) == f"{path} holds no config.json: not a Hugging Face checkpoint"
    assert said(path, need_config=False) == f"{path}/{INDEX} puts a into z.safetensors, where it is not"
    (path / INDEX).write_text('{"weight_map": {"x.safetensors.weight": "y.safetensors"}}')
    assert said(path, False) == f"{path}/y.safetensors holds tensor y.safetensors.weight, but {INDEX} does not name it"
    weights = '"x.safetensors.weight": "x.safetensors", "y.safetensors.weight": "x.safetensors", "a": "y.safetensors"'
    (path / INDEX).write_text(f'{{"weight_map": {{{weights}}}}}')
    assert said(path, False) == (
        f"{path}/y.safetensors holds tensor y.safetensors.weight, but {INDEX} says x.safetensors"
    )
    (path / "y.safetensors").write_bytes(safetensors_bytes({"x.safetensors.weight": random(0, 2, 2)}))
    (path / INDEX).write_text('{"weight_map": {"x.safetensors.weight": "x.safetensors", "a": "y.safetensors"}}')
    assert said(path, False) == f"{path}: tensor x.safetensors.weight is in both x.safetensors and y.safetensors"
    (path / INDEX).unlink()
    for name in ("x.safetensors", "y.safetensors"):
        (path / name).unlink()
    assert said(path, False) == f"{path} holds no tensor"


def test_one_file_without_a_config(source: Path) -> None:
    """Only what is in it: no weight map, no side files."""
    found = open_checkpoint(source / FIRST, need_config=False)
    assert (found.path, list(found.headers), found.config, found.side_files, found.left_out) == (
        source, [FIRST], {}, (), {}
    )  # fmt: skip
    assert 0 < len(found.tensors) < len(llama())
    tensor = found.tensors["model.embed_tokens.weight"]
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.file) == (
        "model.embed_tokens.weight", "BF16", (32, 64), FIRST
    )  # fmt: skip


def test_model_safetensors_goes_before_others(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", llama())
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes({"a": random(0, 2, 2)}))
    assert list(open_checkpoint(folder).headers) == ["model.safetensors"]


def test_what_the_config_says(tmp_path: Path) -> None:
    """In its part for the language model too, and in the file of a layout."""
    inner = {"quantization_config": {"quant_method": "fp8"}, "dtype": "float16"}
    outer = write_checkpoint(tmp_path / "a", llama(), {"text_config": inner, "model_type": "some_vl"})
    found = open_checkpoint(outer)
    assert (found.model_type, found.setting("dtype"), found.quantization) == (
        "some_vl", "float16", {"quant_method": "fp8"}
    )  # fmt: skip
    (outer / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "x"}, "text_config": inner}))
    assert (open_checkpoint(outer).quantization, open_checkpoint(outer).model_type) == ({"quant_method": "x"}, "")
    (outer / "config.json").write_text("{}")
    assert open_checkpoint(outer).quantization == {}
    (outer / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert open_checkpoint(outer).quantization
    (outer / "config.json").unlink()
    assert open_checkpoint(outer, need_config=False).config == {}


def test_surrogates_in_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, good in (("\\ud83d\\ude00", True), ("\\uD83D", False), ("\\\\ud83d", True), ("\\ude00", False)):
        path.write_text(f'{{"a": "{text}"}}')
        if good:
            assert list(read_json(path)) == ["a"]
            continue
        with pytest.raises(CheckpointError) as caught:
            read_json(path)
        wanted = "holds half of a surrogate pair (\\ud800 to \\udfff), which is no Unicode text"
        assert str(caught.value) == f"{path}: {wanted}"
