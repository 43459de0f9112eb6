"""halfbyte and the peers themselves: the installed packages quantize new operands, and every bit is compared.

If a peer is not installed, its tests fail. The drivers are tested too: on the inputs of the golden vectors they must
return the golden outputs. So a difference comes from halfbyte and not from a driver.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from conformance import inputs, make_vectors
from conformance.cases import Recipe, make_case, shapes
from conformance.peers import LIVE, get_peer
from conformance.peers.spec import Offer
from halfbyte.conform import Case, load_vectors, run_case, run_vectors
from halfbyte.conform.vectors import OPERANDS
from halfbyte.testing import assert_same_bits, find_difference

GOLDEN = Path(__file__).parents[2] / "conformance" / "vectors.zip"

SAMPLE = {"modelopt": 12}
"""Every n-th golden case is given to a driver: n is 4 for most peers, and larger where Triton's interpreter is slow."""

OFFERS = [pytest.param(name, offer, id=f"{name}-{offer.label}") for name in LIVE for offer in get_peer(name).offers]

SLOW = ("e4ties", "huge", "zero_block", "nan")
"""The distributions for slow offers; huge makes the tensor-level numbers of a search overflow."""


def recipes(offer: Offer) -> list[Recipe]:
    """Every distribution in every dtype. Shapes alternate; for slow or similar offers dtypes alternate too."""
    names = SLOW if offer.slow else tuple(inputs.GENERATORS)
    if offer.operands not in ("input", "activations", "floats"):
        names = ("gauss",) * 4  # the operands are bytes: only the seed counts
    sizes = shapes(offer)
    one_dtype = offer.slow or "nvfp4_use_4over6" in offer.config
    found = []
    for number, name in enumerate(names):
        dtypes = offer.dtypes[number % len(offer.dtypes) :][:1] if one_dtype else offer.dtypes
        for turn, dtype in enumerate(dtypes):
            found.append(Recipe(name, sizes[(number + turn) % len(sizes)], dtype, seed=7000 + 10 * number + turn))
    return found


@pytest.mark.parametrize(("name", "offer"), OFFERS)
def test_fresh_operands_agree(name: str, offer: Offer) -> None:
    peer = get_peer(name)
    for recipe in recipes(offer):
        case = make_case(peer, offer, recipe)
        result = run_case(case)
        assert result.status == "agree", f"{case.name}\n{result.detail}"


@pytest.mark.parametrize("name", LIVE)
def test_drivers_reproduce_golden_cases(name: str) -> None:
    vectors, peer = load_vectors(GOLDEN), get_peer(name)
    entries = [entry for entry in vectors if entry["peer"] == name][:: SAMPLE.get(name, 4)]
    assert entries
    for entry in entries:
        case = vectors.case(entry)
        results = peer.run(dict(case.tensors), case.format, case.config)
        for tensor in _results(case):
            nan_bytes = tensor.startswith("scales") and case.format == "nvfp4"
            difference = find_difference(results[tensor], case.tensors[tensor], any_nan=True, e4m3=nan_bytes)
            assert difference is None, f"{case.name} {tensor}: {difference.reason}"


def _results(case: Case) -> list[str]:
    """The tensors of a golden case that the peer computed and that do not come from a NaN."""
    given = ("codes", "scales", "blocks") if not {"input", "mx_codes"} & set(case.tensors) else ()
    return [name for name in case.tensors if name not in (*OPERANDS, *given, *case.unstable)]


@pytest.mark.parametrize("name", LIVE)
def test_every_golden_config_is_offered(name: str) -> None:
    """An offer may add options to a golden config, as long as every option's value is offered somewhere."""
    offered = {(key, json.dumps(value)) for offer in get_peer(name).offers for key, value in offer.config.items()}
    results = (
        "info",
        "k_max",
        "tokens",
        "act_seed",
        "act_dist",
    )  # keys for what was drawn or found; they are not options
    defaults = {(key, "false") for key in ("columnwise", "nvfp4_4over6_err_use_fast_math")}
    for entry in load_vectors(GOLDEN):
        if entry["peer"] == name:
            asked = {(key, json.dumps(value)) for key, value in entry["config"].items() if key not in results}
            assert asked <= offered | defaults, entry["name"]


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("name", inputs.GENERATORS)
def test_operands_are_pure_functions_of_their_recipe(name: str, dtype: str) -> None:
    x = inputs.make(name, (3, 40), dtype, 1)
    assert x.shape == (3, 40)
    assert x.dtype == inputs.DTYPES[dtype]
    assert_same_bits(x, inputs.make(name, (3, 40), dtype, 1))
    assert np.isfinite(x.astype(np.float32)).all() == (name in inputs.FINITE)
    if name != "zeros":
        assert find_difference(x, inputs.make(name, (3, 40), dtype, 2)) is not None


def test_ties_lie_half_way_between_elements() -> None:
    x = inputs.make("ties", (8, 64), "bf16", 3).astype(np.float64).reshape(-1, 16)
    scale = x[:, :1] / 6
    on_tie = np.isin(np.abs(x / scale)[:, 1:], inputs.E2M1_TIES)
    assert (~on_tie).sum() <= 16, "all but the block of the anchor, which is scaled to its own"


def test_made_vectors_are_read_back(tmp_path: Path) -> None:
    """A folder and its archive hold the same cases, and halfbyte agrees with them."""
    make_vectors.main(["--out", str(tmp_path / "new"), "--seed", "5", "--peers", "gguf,transformers", "--zip"])
    folder, archive = load_vectors(tmp_path / "new"), load_vectors(tmp_path / "new.zip")
    index = json.loads((tmp_path / "new" / "index.json").read_text())
    assert index["count"] == len(folder) == len(archive) > 20
    assert index["bytes"] == sum(path.stat().st_size for path in (tmp_path / "new").rglob("*.safetensors"))
    assert zipfile.is_zipfile(tmp_path / "new.zip")
    differing = [result for result in run_vectors(archive).results if result.status == "differ"]
    assert not differing, differing[0]


def test_made_vectors_refuse_what_they_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_vectors.main(["--out", str(tmp_path / "new"), "--seed", "5", "--peers", "vllm"])
    assert "no driver for vllm; live: compressed_tensors" in capsys.readouterr().err
    (tmp_path / "kept").write_text("")
    with pytest.raises(SystemExit):
        make_vectors.main(["--out", str(tmp_path), "--seed", "5"])
    assert "is not empty" in capsys.readouterr().err
