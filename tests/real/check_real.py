"""SmolLM2 and MiniLM, converted, load in transformers and compute what their decoded weights compute. `make test-real`.

Each model goes through `convert`, `verify`, the load check and transformers itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.peers.spec import quiet
from examples import minilm
from examples.bert import WordPiece
from examples.sentences import SENTENCES
from halfbyte.load_check import check_load
from halfbyte.verify import verify
from tests.clients.converted import convert
from tests.real import smollm2

FORMATS = ("nvfp4", "mxfp4")
CT = ("--layout", "compressed-tensors")


def load(path: Path, name: str) -> Any:
    """The model in bfloat16; the loader missed nothing and left nothing over."""
    with quiet():
        import transformers

        transformers.logging.set_verbosity_error()
        model, told = getattr(transformers, name).from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert {key: value for key, value in told.items() if value} == {}
    return model.eval()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def convert_and_check(source: Path, folder: Path, format: str) -> Path:
    """Converted, verified against its source, and loadable by its names and shapes."""
    path = convert(source, folder / format, "--to", format, *CT)
    report = verify(path, source)
    assert report.clean, report.problems
    found = check_load(path, "transformers")
    assert found.clean, found.sentences()
    return path


def smollm2_words() -> torch.Tensor:
    """Sentences as rows of 64 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2.fetch() / "tokenizer.json"))
    words = tokenizer.encode(" ".join(SENTENCES)).ids
    return torch.tensor(words[: len(words) // 64 * 64]).reshape(-1, 64)[:16]


def logits(model: Any, words: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(words).logits).float()


def loss(found: torch.Tensor, words: torch.Tensor) -> float:
    """Mean surprise of the next token."""
    return float(torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), words[:, 1:].flatten()))


@pytest.fixture(scope="module")
def smollm2_source() -> tuple[torch.Tensor, float]:
    words = smollm2_words()
    return words, loss(logits(load(smollm2.fetch(), "LlamaForCausalLM"), words), words)


def test_smollm2_knows_english(smollm2_source: tuple[torch.Tensor, float]) -> None:
    """The source is the trained model: a wrong name or order of rows would know nothing (10.8)."""
    assert smollm2_source[1] < 4.5


@pytest.mark.parametrize("format", FORMATS)
def test_smollm2(tmp_path: Path, smollm2_source: tuple[torch.Tensor, float], format: str) -> None:
    words, before = smollm2_source
    path = convert_and_check(smollm2.fetch(), tmp_path, format)
    found = logits(load(path, "LlamaForCausalLM"), words)
    decoded = convert(path, tmp_path / "decoded", "--to", "bf16")
    assert relative(found, logits(load(decoded, "LlamaForCausalLM"), words)) < 1e-5
    assert 0 < loss(found, words) - before < 1  # measured: 0.17 NVFP4, 0.62 MXFP4; a model that guesses is 7.3 worse


def sentence_vectors(model: Any) -> torch.Tensor:
    """One vector of length 1 a sentence: the mean of its tokens."""
    tokenizer = WordPiece(minilm.SOURCE / "vocab.txt")
    rows = []
    for sentence in SENTENCES[:40]:
        with torch.no_grad():
            states = model(torch.tensor([tokenizer.encode(sentence)])).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(states.float().mean(dim=0), dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("format", FORMATS)
def test_minilm(tmp_path: Path, format: str) -> None:
    minilm.fetch()
    path = convert_and_check(minilm.SOURCE, tmp_path, format)
    found = sentence_vectors(load(path, "BertModel"))
    decoded = convert(path, tmp_path / "decoded", "--to", "bf16")
    assert relative(found, sentence_vectors(load(decoded, "BertModel"))) < 1e-5
    cosines = (found * sentence_vectors(load(minilm.SOURCE, "BertModel"))).sum(dim=1)
    assert 0.95 < float(cosines.mean()) < 0.9999  # measured: 0.979 NVFP4, 0.965 MXFP4
