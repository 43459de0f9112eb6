"""The values of options that `halfbyte contracts` lists are those that the contracts take."""

from __future__ import annotations

from typing import Any

import pytest

import halfbyte as hb
from halfbyte.contracts import CONTRACTS
from halfbyte.contracts.options import option_choices

DEPEND = {("flashinfer", "per_token"), ("transformer_engine", "with_rht")}
"""True needs another option."""


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_listed_value_is_taken_and_no_other_text(name: str) -> None:
    make = CONTRACTS[name]
    listed = option_choices(make)
    for option, default in (make.__kwdefaults__ or {}).items():
        given: Any = listed.get(option, ())
        assert given or not isinstance(default, str), option
        for value in given:
            if (name, option) not in DEPEND:
                make(**{option: value})
        if given and isinstance(given[0], str):
            if option in ("err_mode", "nvfp4_4over6_err_mode"):
                continue  # read with 4over6 alone
            with pytest.raises(hb.UnknownNameError) as error:
                make(**{option: "nothing"})
            assert all(value in str(error.value) for value in given)
