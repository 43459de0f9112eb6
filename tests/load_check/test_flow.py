"""Names travel with values through whatever torch does to them; numbers written into weights are counted."""

from __future__ import annotations

import pytest
import torch

from halfbyte.load_check.flow import Flow


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_copy() -> None:
    source, weight, other = meta(4, 3), meta(4, 3), meta(2)
    flow = Flow({"a": source})
    with flow.watching():
        weight.copy_(source)
    assert flow.names_in([weight]) == {"a"}
    assert flow.written(weight) == 12
    assert flow.written(other) == 0
    assert flow.names_in([other]) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x.to(torch.float16),
        lambda x: torch.cat([x, x])[:4],
        lambda x: torch.stack(list(x.unbind())),
        lambda x: x.chunk(2)[1].repeat(2, 1),
        lambda x: x * 2 + 1,
    ],
)
def test_the_name_survives(change: object) -> None:
    source, weight = meta(4, 3), torch.nn.Parameter(meta(4, 3))
    flow = Flow({"a": source})
    with flow.watching():
        weight.data.copy_(change(source))  # type: ignore[operator]
    assert flow.names_in([weight]) == {"a"}


def test_a_fused_weight_that_is_filled_in_part() -> None:
    parts = {"q": meta(4, 3), "k": meta(2, 3), "v": meta(2, 3)}
    weight = torch.nn.Parameter(meta(8, 3))
    flow = Flow(parts)
    with flow.watching():
        weight.data.narrow(0, 0, 4).copy_(parts["q"])
        weight.data[6:] = parts["v"]
    assert flow.names_in([weight]) == {"q", "v"}
    assert flow.written(weight) == 18


def test_a_weight_that_is_written_twice_is_full_and_no_more() -> None:
    source, weight = meta(3), meta(3)
    flow = Flow({"a": source})
    with flow.watching():
        weight.copy_(source)
        weight.copy_(source)
    assert flow.written(weight) == 3


def test_a_number_that_is_read() -> None:
    source, weight = torch.ones(()), meta(1)
    flow = Flow({"scale": source})
    with flow.watching():
        weight.fill_(source.item())
    assert flow.names_in([weight]) == {"scale"}
    assert flow.written(weight) == 1


def test_padding_counts_as_written() -> None:
    source, weight = meta(3), meta(8)
    flow = Flow({"a": source})
    with flow.watching():
        weight[:3].copy_(source)
        weight[3:].fill_(0)
    assert flow.written(weight) == 8


def test_what_is_done_elsewhere_is_not_seen() -> None:
    source, weight = meta(3), meta(3)
    flow = Flow({"a": source})
    weight.copy_(source)
    assert flow.written(weight) == 0


def test_storages_that_come_and_go_do_not_lend_their_names() -> None:
    """A new storage may lie at the address of one that is gone."""
    flow = Flow({"a": meta(3)})
    with flow.watching():
        for _ in range(100):
            meta(3).copy_(meta(3))
    assert all(flow.written(meta(3)) == 0 for _ in range(100))
