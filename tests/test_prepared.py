"""What quantize() and dequantize() keep between calls: never an answer to another question, and no memory for long."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts, prepared
from halfbyte.backends import BACKENDS
from halfbyte.backends.cpu import recipe, tables_mx, tables_nvfp4
from halfbyte.contracts import CONTRACTS
from halfbyte.contracts.spec import NVFP4Rule
from halfbyte.formats import FORMATS
from halfbyte.methods import METHODS
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = gaussian(4, 64)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with empty tables, and leaves nothing behind."""
    monkeypatch.setattr(prepared, "_KEPT", {})
    monkeypatch.setattr(prepared, "_KEPT_DECODING", {})


def assert_same(got: hb.QuantizedTensor, wanted: hb.QuantizedTensor) -> None:
    for part in ("codes", "scales", "global_scale", "stored_scale"):
        a, b = getattr(got, part), getattr(wanted, part)
        assert (a is None) == (b is None)
        if b is not None:
            assert_same_bits(a, b)


def as_reference(*arguments: Any, **options: Any) -> None:
    """The call gives the bits of the reference, with the table as it is and once more from the table."""
    wanted = hb.quantize(*arguments, **{**options, "backend": "reference"})
    for _ in range(2):
        got = hb.quantize(*arguments, **options)
        assert_same(got, wanted)
        assert (got.format, got.contract, got.method) == (wanted.format, wanted.contract, wanted.method)
        assert_same_bits(hb.dequantize(got), hb.dequantize(wanted, backend="reference"))


def without_block_zero(name: str = "acme") -> contracts.Contract:
    """A contract with Model-Optimizer's name for its smallest scale, but another number."""
    plain = contracts.modelopt()
    rule = plain.rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    changed = dataclasses.replace(rule, scale_byte=dataclasses.replace(rule.scale_byte, smallest=2.0**-6))
    return dataclasses.replace(plain, name=name, rules={**plain.rules, "nvfp4": changed})


def test_the_second_call_resolves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hb.dequantize(hb.quantize(X, "nvfp4", "modelopt", "optimal"))

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("resolved again")

    for name in ("resolve", "resolve_decoding"):
        monkeypatch.setattr(prepared, name, never)
    monkeypatch.setattr("halfbyte.backends.choose_backend", never)
    hb.dequantize(hb.quantize(X, "nvfp4", "modelopt", "optimal"))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("method", ["amax", "optimal"])
def test_no_table_is_built_twice(format: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = hb.quantize(X, format, method=method)
    hb.dequantize(q)

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("built again")

    for module in (tables_mx, recipe, tables_nvfp4):
        for name in vars(module):
            if name.startswith(("build_", "search_tables", "decode_table", "element_constants", "recipe_of")):
                monkeypatch.setattr(module, name, never)
    assert_same(hb.quantize(X, format, method=method), q)
    hb.dequantize(q)


def test_contracts_of_one_name_are_told_apart() -> None:
    tiny = (X * np.float32(1e-4)).astype(np.float32)
    tiny[0, 0] = 100
    one, other = without_block_zero("modelopt"), contracts.modelopt()
    assert one.name == other.name
    as_reference(tiny, "nvfp4", other)
    as_reference(tiny, "nvfp4", one)
    assert np.any(hb.quantize(tiny, "nvfp4", one).scales != hb.quantize(tiny, "nvfp4", other).scales)


def test_a_contract_whose_rules_are_changed_is_seen() -> None:
    """A contract is frozen, but the table of its rules is the caller's."""
    rules = dict(contracts.modelopt().rules)
    contract = dataclasses.replace(contracts.modelopt(), rules=rules)
    as_reference(X, "nvfp4", contract)
    before = hb.quantize(X, "nvfp4", contract)
    rules["nvfp4"] = contracts.transformer_engine().rules["nvfp4"]
    as_reference(X, "nvfp4", contract)
    assert before.stored_scale != hb.quantize(X, "nvfp4", contract).stored_scale


def test_names_are_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    as_reference(X, "nvfp4")
    with monkeypatch.context() as patch:
        patch.setitem(FORMATS, "nvfp4", dataclasses.replace(FORMATS["nvfp4"], block=32))
        assert hb.quantize(X, "nvfp4").scales.shape == (4, 2)
        as_reference(X, "nvfp4")
    assert hb.quantize(X, "nvfp4").scales.shape == (4, 4)
    monkeypatch.setitem(CONTRACTS, "acme", without_block_zero)
    as_reference(X, "nvfp4", "acme")
    monkeypatch.delitem(CONTRACTS, "acme")
    with pytest.raises(hb.UnknownNameError, match="unknown contract 'acme'"):
        hb.quantize(X, "nvfp4", "acme")
    hb.quantize(X, "nvfp4", method="optimal")
    monkeypatch.delitem(METHODS, "optimal")
    with pytest.raises(hb.UnknownNameError, match="unknown method 'optimal'"):
        hb.quantize(X, "nvfp4", method="optimal")


def test_a_backend_that_is_added_or_removed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    hb.quantize(X, "nvfp4", backend="cpu")
    monkeypatch.delitem(BACKENDS, "cpu")
    with pytest.raises(hb.UnknownNameError, match="unknown backend 'cpu'"):
        hb.quantize(X, "nvfp4", backend="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"threads": True},
        {"threads": 1.0},
        {"block": 16.0},
        {"tile": (1.0, 16.0)},
        {"tile": "16"},
        {"scaling": b"tensor"},
        {"backend": ["cpu"]},
        {"contract": 5},
        {"method": ["amax"]},
    ],
    ids=str,
)
def test_a_wrong_option_that_equals_a_kept_one_still_raises(options: dict[str, Any]) -> None:
    for kept in ({}, {"threads": 1}, {"block": 16}, {"tile": (1, 16)}, {"scaling": "tensor"}, {"backend": "cpu"}):
        hb.quantize(X, "nvfp4", **kept)
    for _ in range(2):
        with pytest.raises(hb.HalfbyteError):
            hb.quantize(X, "nvfp4", **options)


def test_options_are_told_apart() -> None:
    for options in (
        {"block": 16}, {"block": 32}, {"tile": (16, 16)}, {"tile": [16, 16]}, {"scaling": "row"}, {"threads": 3}, {},
    ):  # fmt: skip
        as_reference(gaussian(16, 64), "nvfp4", **options)


def test_dtypes_are_told_apart() -> None:
    import ml_dtypes

    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float32):
        as_reference(X.astype(dtype), "nvfp4")
    assert hb.quantize(X.astype(np.float64), "nvfp4") == hb.quantize(X.astype(np.float32), "nvfp4")
    with pytest.raises(hb.InputError, match="cannot quantize dtype >f4"):
        hb.quantize(X.astype(">f4"), "nvfp4")


def test_shapes_are_checked_on_every_call() -> None:
    as_reference(X, "nvfp4")
    for shape in ((), (4, 0)):
        with pytest.raises(hb.InputError):
            hb.quantize(np.zeros(shape, np.float32), "nvfp4")


def test_a_given_amax_is_checked_on_every_call() -> None:
    hb.quantize(X, "nvfp4", global_amax=3.0)
    with pytest.raises(hb.InputError, match="must not be negative or NaN"):
        hb.quantize(X, "nvfp4", global_amax=-1.0)
    hb.quantize(X, "mxfp4")
    with pytest.raises(hb.UnsupportedError, match="leave global_amax out"):
        hb.quantize(X, "mxfp4", global_amax=3.0)
    as_reference(X, "nvfp4", global_amax=-0.0)


def test_a_stored_scale_is_asked_for_on_every_call() -> None:
    q = hb.quantize(X, "nvfp4")
    hb.dequantize(q)
    with pytest.raises(hb.InputError, match="with a stored scale, and the tensor has none"):
        hb.dequantize(dataclasses.replace(q, stored_scale=None))


def test_a_method_with_arrays_is_not_kept_alive() -> None:
    methods: list[hb.methods.Method] = [hb.Optimal(np.ones(64)), hb.Hessian(np.eye(16)[None].repeat(4, 0))]
    for method in methods:
        hb.dequantize(hb.quantize(X, "nvfp4", method=method))
    dying = [weakref.ref(method) for method in methods]
    del methods, method
    gc.collect()
    assert [reference() for reference in dying] == [None, None]


def test_a_contract_in_the_key_keeps_its_identity() -> None:
    """Contracts made and dropped in a loop may get one address; an entry holds its contract, so none is mistaken."""
    for smallest in (2.0**-9, 2.0**-6, 0.0) * 20:
        plain = contracts.modelopt()
        rule = plain.rules["nvfp4"]
        assert isinstance(rule, NVFP4Rule)
        changed = dataclasses.replace(rule, scale_byte=dataclasses.replace(rule.scale_byte, smallest=smallest))
        q = hb.quantize(X, "nvfp4", dataclasses.replace(plain, rules={"nvfp4": changed}))
        found = q.contract.rules["nvfp4"]
        assert isinstance(found, NVFP4Rule)
        assert found.scale_byte.smallest == smallest


def test_the_tables_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_KEPT", 8)
    for _ in range(20):
        hb.dequantize(hb.quantize(X, "nvfp4", contracts.modelopt()))
    assert 0 < len(prepared._KEPT) <= 8
    assert 0 < len(prepared._KEPT_DECODING) <= 8


def test_threads_do_not_disturb_each_other() -> None:
    """Different requests and tensors at the same time, small and with tables of their own."""
    work = [
        (gaussian(rows, 64, seed=seed), format, contract, method)
        for seed, rows in enumerate((1, 7, 300))
        for format, contract in (("nvfp4", "modelopt"), ("nvfp4", "transformer_engine"), ("mxfp4", "ocp"))
        for method in ("amax", "optimal")
    ]
    wanted = [hb.quantize(*arguments, threads=1) for arguments in work]
    decoded = [hb.dequantize(q) for q in wanted]
    failures: list[str] = []

    def run(first: int) -> None:
        try:
            for turn in range(24):
                index = (first * 5 + turn) % len(work)
                got = hb.quantize(*work[index])
                assert_same(got, wanted[index])
                assert_same_bits(hb.dequantize(got), decoded[index])
                if turn % 7 == 0:
                    prepared._KEPT.clear()
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- tensors that are not what their address says ---


def test_tensors_that_only_look_ordinary_take_the_long_way() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(gaussian(4, 64))
    wanted = hb.quantize(X, "nvfp4", backend="reference")
    as_reference(x.numpy(), "nvfp4")
    raw = torch.zeros(x.numel() * 4 + 1, dtype=torch.uint8)
    raw[1:] = x.view(torch.uint8).reshape(-1)
    shifted = torch.frombuffer(raw.numpy().data, dtype=torch.float32, offset=1, count=x.numel()).view(4, 64)
    assert shifted.data_ptr() % 4 == 1
    strided = torch.stack([x, -x], dim=-1)[..., 0]
    wide = torch.cat([x, x], dim=1)[:, :64]
    negated = torch._neg_view(-x)  # what the imaginary part of a conjugate is
    parameter = torch.nn.Parameter(x)
    assert negated.is_neg()
    for tensor in (x, shifted, strided, wide, negated, parameter, x.clone().requires_grad_()):
        got = hb.quantize(tensor, "nvfp4")
        assert_same(got, wanted)
        assert not got.codes.requires_grad  # type: ignore[union-attr]
        assert_same_bits(hb.dequantize(got), hb.dequantize(wanted, backend="reference"))
    with pytest.raises(hb.InputError, match="dense torch tensor"):
        hb.quantize(x.to_sparse(), "nvfp4")


def test_a_default_device_does_not_move_the_result() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(gaussian(4, 64))
    wanted = hb.quantize(x, "nvfp4")
    with torch.device("meta"):
        got = hb.quantize(x, "nvfp4")
        values = hb.dequantize(got)
    assert_same(got, wanted)
    assert str(values.device) == "cpu"
