"""The hash of a tensor does not depend on how its bytes were cut, nor on the order in which the pieces came."""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref

import numpy as np
import pytest

from halfbyte.backends.encoding import Hashed
from halfbyte.checkpoint.execute import hashes
from halfbyte.checkpoint.execute.hashes import LEAF, PLAIN, TREE, PlainHash, TreeHash, hash_named
from halfbyte.codec.bits import U8

SIZES = (0, 1, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF, 5 * LEAF + 77)


def by_hand(data: U8) -> str:
    leaves = [hashlib.sha256(data[at : at + LEAF].tobytes()).digest() for at in range(0, data.size, LEAF)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:32]


def some_bytes(size: int) -> U8:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def cuts(size: int, count: int, seed: int) -> list[tuple[int, int]]:
    """That many random ranges that cover all bytes, in a random order."""
    generator = np.random.default_rng(seed)
    edges = sorted({0, size, *(int(edge) for edge in generator.integers(0, size + 1, count))})
    ranges = list(itertools.pairwise(edges))
    generator.shuffle(ranges)
    return ranges


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_any_cut_in_any_order(size: int, count: int) -> None:
    data = some_bytes(size)
    for seed in range(5):
        tree = TreeHash(size)
        for start, stop in cuts(size, count, seed):
            tree.add(start, data[start:stop])
        assert tree.done == size
        assert tree.text() == by_hand(data)


def test_byte_by_byte_around_the_edges_of_leaves() -> None:
    data = some_bytes(2 * LEAF)
    edges = [0, 1, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF - 1, 2 * LEAF]
    tree = TreeHash(data.size)
    for start, stop in reversed(list(itertools.pairwise(edges))):
        tree.add(start, data[start:stop])
    assert tree.text() == by_hand(data)


def test_pieces_from_many_threads() -> None:
    data = some_bytes(40 * LEAF + 5)
    tree = TreeHash(data.size)
    ranges = cuts(data.size, 200, 0)

    def add(first: int) -> None:
        for start, stop in ranges[first::8]:
            tree.add(start, data[start:stop])

    threads = [threading.Thread(target=add, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tree.text() == by_hand(data)


def test_two_threads_with_parts_of_one_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first one begins the leaf."""
    data, tree, others = some_bytes(LEAF), TreeHash(LEAF), list[threading.Thread]()

    def slow_bytes(size: int) -> bytearray:
        if not others:
            others.append(threading.Thread(target=tree.add, args=(100, data[100:])))
            others[0].start()
            others[0].join(0.2)
        return bytearray(size)

    monkeypatch.setattr(hashes, "bytearray", slow_bytes, raising=False)
    tree.add(0, data[:100])
    others[0].join()
    assert tree.text() == by_hand(data)


def test_two_threads_that_count() -> None:
    tree, others = TreeHash(LEAF), list[threading.Thread]()

    class Slow(int):
        def __radd__(self, before: int) -> int:
            others.append(threading.Thread(target=tree._count, args=(30,)))
            others[0].start()
            others[0].join(0.2)
            return before + int(self)

    tree._count(Slow(7))
    others[0].join()
    assert tree.done == 37


def test_one_changed_byte_changes_the_hash() -> None:
    data = some_bytes(3 * LEAF + 9)
    seen = {by_hand(data)}
    for at in (0, LEAF, 2 * LEAF + 5, data.size - 1):
        other = data.copy()
        other[at] ^= 1
        tree = TreeHash(other.size)
        tree.add(0, other)
        seen.add(tree.text())
    assert len(seen) == 5


def test_a_manifest_says_which_hash_it_has() -> None:
    assert hash_named({"hash": TREE}) is TreeHash
    assert hash_named({"hash": PLAIN}) is PlainHash
    assert hash_named({"hash": "md5"}) is None
    plain = PlainHash(5)
    plain.add(0, some_bytes(5))
    assert plain.text() == hashlib.sha256(some_bytes(5).tobytes()).hexdigest()[:32]


def test_leaves_go_when_the_hash_is_known() -> None:
    """A shard has many tensors."""
    data = some_bytes(3 * LEAF)
    tree = TreeHash(data.size)
    leaves = weakref.ref(tree._leaves)
    tree.add(0, data[: 2 * LEAF])
    assert leaves() is not None
    tree.add(2 * LEAF, data[2 * LEAF :])
    assert leaves() is None
    assert tree.text() == tree.text() == by_hand(data)
    assert tree._leaves.size == 0


@pytest.mark.parametrize(
    ("at", "size", "fits"),
    [
        (0, LEAF, True), (LEAF, 2 * LEAF, True), (LEAF, LEAF, True), (0, 3 * LEAF + 5, True),
        (LEAF, 2 * LEAF + 5, True),
        (1, LEAF, False), (1, 3 * LEAF + 4, False), (0, LEAF + 1, False), (LEAF, 2 * LEAF + 4, False), (0, 5, False),
        (3 * LEAF, 5, True),
    ],
)  # fmt: skip
def test_ranges_that_begin_and_end_with_leaves(at: int, size: int, fits: bool) -> None:
    assert TreeHash(3 * LEAF + 5).fits(at, size) is fits


@pytest.mark.parametrize(
    ("at", "size", "skip", "leaves"),
    [
        (0, 3 * LEAF, 0, 3), (0, 3 * LEAF - 1, 0, 2), (5, 3 * LEAF, LEAF - 5, 2), (5, LEAF, LEAF - 5, 0),
        (5, 10, 10, 0), (LEAF - 1, LEAF + 1, 1, 1), (LEAF, LEAF, 0, 1), (2 * LEAF, 0, 0, 0),
    ],
)  # fmt: skip
def test_leaves_that_lie_wholly_in_a_range(at: int, size: int, skip: int, leaves: int) -> None:
    data = np.zeros(size, np.uint8)
    found = TreeHash(4 * LEAF).hashable(at, data, 77)
    assert (found.data is data, found.offset, found.skip, found.leaves) == (True, 77, skip, leaves)


def test_bytes_of_which_only_the_tail_is_left() -> None:
    """As a call gives them that wrote all else itself."""
    data = some_bytes(4 * LEAF + 9)
    tree = TreeHash(data.size)
    for start, stop in ((2 * LEAF, 4 * LEAF + 9), (0, 2 * LEAF)):
        whole = [data[at : at + LEAF].tobytes() for at in range(start, stop - LEAF + 1, LEAF)]
        digests = np.array([list(hashlib.sha256(leaf).digest()) for leaf in whole], np.uint8)
        tree.put_hashed(start, stop - start, Hashed(digests, data[start + len(whole) * LEAF : stop]))
    assert tree.done == data.size
    assert tree.text() == by_hand(data)
