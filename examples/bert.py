"""A BERT encoder and its tokenizer in numpy, just enough to compute sentence embeddings."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Weights = Mapping[str, F32]
See = Callable[[str, F32], None]


class WordPiece:
    """Lower-case WordPiece: words are cut into the longest pieces that are in the vocabulary."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self.numbers = {word: number for number, word in enumerate(words)}

    def encode(self, text: str) -> list[int]:
        pieces = [piece for word in _words(text) for piece in self._pieces(word)]
        return [self.numbers["[CLS]"], *pieces, self.numbers["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            for stop in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:stop]
                if piece in self.numbers:
                    found.append(self.numbers[piece])
                    start = stop
                    break
            else:
                return [self.numbers["[UNK]"]]
        return found


def _words(text: str) -> Iterator[str]:
    """Words and punctuation marks, without accents."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    word = ""
    for character in plain:
        if character.isalnum():
            word += character
            continue
        if word:
            yield word
        word = ""
        if not character.isspace():
            yield character
    if word:
        yield word


def unseen(module: str, inputs: F32) -> None:
    """What looks at no inputs."""


def embed(weights: Weights, heads: int, epsilon: float, sentences: Sequence[Sequence[int]], see: See = unseen) -> F32:
    """The mean of the last layer's vectors, scaled to length 1, one row per sentence.

    Sentences of equal length run together, so nothing is padded. see: gets every linear layer with its inputs (tokens,
    width).
    """
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    width = weights["embeddings.LayerNorm.bias"].size
    rows = np.empty((len(sentences), width), np.float32)
    lengths = np.array([len(tokens) for tokens in sentences])
    for length in np.unique(lengths):
        which = np.flatnonzero(lengths == length).tolist()
        x = _embedding(weights, np.array([sentences[i] for i in which]), epsilon)
        for layer in range(layers):
            x = _layer(weights, f"encoder.layer.{layer}", x, (heads, epsilon), see)
        rows[which] = x.mean(axis=1)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _embedding(weights: Weights, tokens: npt.NDArray[np.int64], epsilon: float) -> F32:
    x = weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = x + weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    return _norm(weights, "embeddings.LayerNorm", x, epsilon)


def _layer(weights: Weights, name: str, x: F32, shape: tuple[int, float], see: See) -> F32:
    """One layer of the encoder. x has shape [sentences, tokens, width]."""
    heads, epsilon = shape
    query, key, value = (
        _linear(weights, f"{name}.attention.self.{part}", x, see).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
        for part in ("query", "key", "value")
    )
    mixed = _softmax(query @ key.transpose(0, 1, 3, 2) / np.float32(query.shape[3] ** 0.5)) @ value
    attended = _linear(weights, f"{name}.attention.output.dense", mixed.transpose(0, 2, 1, 3).reshape(x.shape), see)
    x = _norm(weights, f"{name}.attention.output.LayerNorm", x + attended, epsilon)
    inner = _gelu(_linear(weights, f"{name}.intermediate.dense", x, see))
    made = _linear(weights, f"{name}.output.dense", inner, see)
    return _norm(weights, f"{name}.output.LayerNorm", x + made, epsilon)


def _linear(weights: Weights, name: str, x: F32, see: See) -> F32:
    see(name, x.reshape(-1, x.shape[-1]))
    flat = x.reshape(-1, x.shape[-1]) @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return flat.reshape(*x.shape[:-1], -1)


def _norm(weights: Weights, name: str, x: F32, epsilon: float) -> F32:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(epsilon))
    return np.asarray(centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"], np.float32)


def _softmax(x: F32) -> F32:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def _gelu(x: F32) -> F32:
    """x Φ(x). The error function is Abramowitz and Stegun's formula 7.1.26, with an error of at most 1.5e-7."""
    z = np.abs(x) / np.float32(2**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    coefficients = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    polynomial = np.zeros_like(t)
    for coefficient in reversed(coefficients):
        polynomial = (polynomial + np.float32(coefficient)) * t
    erf = np.sign(x) * (1 - polynomial * np.exp(-z * z))
    return np.asarray(0.5 * x * (1 + erf), np.float32)
