"""Every changed output byte is noticed. tests/ledger.py describes the hashes and how to rewrite them."""

from __future__ import annotations

import json

import pytest

from tests.backends.cases import Case, every_case, peer_cases
from tests.ledger import LEDGER, checkpoint_entries, digest, outputs

WRITTEN = json.loads(LEDGER.read_text())
CASES = every_case() + peer_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_quantized_tensor_is_what_it_was(case: Case) -> None:
    assert digest(outputs(case)) == WRITTEN["tensors"][str(case)]


def test_every_entry_has_its_case() -> None:
    assert set(WRITTEN["tensors"]) == {str(case) for case in CASES}


def test_a_converted_checkpoint_is_what_it_was() -> None:
    assert dict(checkpoint_entries()) == WRITTEN["checkpoints"]
