"""What `halfbyte finish` says of shards that are missing, and who is refused to begin: whole messages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute.ranked import _listed, _refuse_others, _what_is_missing, finish_ranks
from halfbyte.checkpoint.execute.ranks import Rank
from halfbyte.errors import CheckpointError

INTO = Path("d")


def journals(of: int, **shares: str) -> dict[Rank, Any]:
    """Rank → a journal whose share has these shards, a letter each."""
    return {Rank(int(name[1:]), of): SimpleNamespace(first={"share": list(share)}) for name, share in shares.items()}


@pytest.mark.parametrize(
    ("missing", "begun", "wanted"),
    [
        ("a", journals(2, r0="ac", r1="b"), "1 shard is missing in d (a); not done: rank 0 of 2"),
        (
            "ab", journals(3, r0="ac", r1="b"),
            "2 shards are missing in d (a, b); not done: rank 0, 1 of 3; never begun: rank 2 of 3",
        ),
        ("abc", journals(2, r1="x"), "3 shards are missing in d (a, b, c); never begun: rank 0 of 2"),
        (
            "abcde", journals(6, r5="a"),
            "5 shards are missing in d (a, b, c, …); not done: rank 5 of 6; never begun: rank 0, 1, 2, … of 6",
        ),
        # of runs with several numbers of ranks, the one with the most counts
        (
            "a", journals(2, r0="a", r1="b") | journals(3, r0="x", r1="a"),
            "1 shard is missing in d (a); not done: rank 1 of 3; never begun: rank 2 of 3",
        ),
        ("a", {}, "1 shard is missing in d (a)"),
        ("a", {Rank(0, 1): SimpleNamespace(first={})}, "1 shard is missing in d (a)"),
    ],
)  # fmt: skip
def test_what_is_missing(missing: str, begun: dict[Rank, Any], wanted: str) -> None:
    found = _what_is_missing(INTO, list(missing), begun)
    assert found == f"{wanted}. Run these ranks again, or the same command without --rank"


def test_no_more_than_three_are_listed() -> None:
    assert [_listed(list(range(count))) for count in range(5)] == ["", "0", "0, 1", "0, 1, 2", "0, 1, 2, …"]


def test_who_is_refused_to_begin() -> None:
    _refuse_others(Rank(1, 3), [Rank(0, 3), Rank(2, 3)], INTO)
    _refuse_others(Rank(1, 3), [], INTO)
    for running, message in (
        ([Rank(0, 3), Rank(1, 3)], "rank 1 of 3 is running already in d; start each rank once"),
        ([Rank(0, 2)], "rank 0 of 2 is running in d, and this is rank 1 of 3; give every rank the same --world-size"),
    ):
        with pytest.raises(CheckpointError) as caught:
            _refuse_others(Rank(1, 3), running, INTO)
        assert str(caught.value) == message


def test_a_folder_in_which_nothing_was_begun(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for folder, message in (
        (gone, f"{gone} is not there; give the DST of `halfbyte convert --rank …`"),
        (tmp_path, f"{tmp_path} holds no conversion that ranks have begun"),
    ):
        with pytest.raises(CheckpointError) as caught:
            finish_ranks(folder, sync=False)
        assert str(caught.value) == message
