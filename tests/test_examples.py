"""The demo's encoder and tokenizer give the results of transformers; there are two hundred sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.peers.spec import quiet
from examples.bert import WordPiece, embed
from examples.sentences import SENTENCES

VOCABULARY = """[PAD] [UNK] [CLS] [SEP] the a cat ##s sat on mat , . ' un ##fold ##ing cafe 12 ##3 ! über"""


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY.split()) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The cats sat, on a mat.", ["the", "cat", "##s", "sat", ",", "on", "a", "mat", "."]),
        ("Unfolding café 123!", ["un", "##fold", "##ing", "cafe", "12", "##3", "!"]),
        ("the zebra", ["the", "[UNK]"]),
        ("", []),
    ],
)
def test_words_are_cut_into_the_longest_pieces(vocabulary: Path, text: str, pieces: list[str]) -> None:
    tokenizer = WordPiece(vocabulary)
    words = VOCABULARY.split()
    assert [words[number] for number in tokenizer.encode(text)] == ["[CLS]", *pieces, "[SEP]"]


def test_embeddings_are_those_of_transformers() -> None:
    with quiet():
        from transformers import BertConfig, BertModel
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        initializer_range=0.3, layer_norm_eps=1e-12,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    sentences = [[2, 7, 9, 3], [2, 11, 3], [2, 30, 31, 3]]
    found = embed(weights, 4, 1e-12, sentences)
    for row, tokens in zip(found, sentences, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([tokens])).last_hidden_state[0]
        wanted = states.mean(dim=0).numpy()
        assert np.abs(row - wanted / np.linalg.norm(wanted)).max() < 1e-6


def test_sentences() -> None:
    assert len(set(SENTENCES)) == len(SENTENCES) == 200
