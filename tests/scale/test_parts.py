"""Parts of a plan: written one by one in processes that know no more, they are the shards of the whole plan."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.checkpoint import Options, Plan, Rules, make_plan, run
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.pool import shard_bytes
from halfbyte.errors import UnsupportedError
from halfbyte.scale.convert import run_on_cluster
from halfbyte.scale.parts import Parts
from halfbyte.scale.tasks import remove_attempts, see, write_part
from tests.checkpoint.execute.scenes import ONE, plan_of, small_source
from tests.checkpoint.test_calibrated import statistics
from tests.checkpoint.test_smoothing import CONFIG, smoothing_of, tensors_of
from tests.checkpoint.toy import all_bytes, llama, random, write_checkpoint
from tests.scale.in_process import InProcess


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(small_source(tmp_path / "source", shards=4))


@pytest.mark.parametrize("method", ["amax", "optimal"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_parts_write_the_shards_of_the_plan(tmp_path: Path, method: str, layout: str) -> None:
    source = write_checkpoint(tmp_path / "source", llama(), shards=4)
    plan = make_plan(source, Options(method=method, layout=layout, activations="unit", rules=Rules(keep_first=1)))
    run(plan, tmp_path / "one machine", ONE)
    parts, work = Parts(plan), tmp_path / "work"
    work.mkdir()
    for names in parts.cut(plan.shards, places=2):
        part = pickle.loads(pickle.dumps(parts.make(names)))
        written = write_part(part, work, ONE, False)
        assert (written.error, written.bad) == ("", {})
        for done in written.finished:
            made = (work / f"{done.name}{written.tag}").read_bytes()
            assert made == (tmp_path / "one machine" / done.name).read_bytes()
    assert len(list(work.iterdir())) == 4


def test_parts_have_factors_and_statistics(tmp_path: Path) -> None:
    """Factors of smoothing and statistics of gptq on the nodes of a cluster: the bytes of one machine."""
    tensors = tensors_of()
    statistics(tmp_path / "stats", tensors)
    source = write_checkpoint(tmp_path / "s", tensors, CONFIG, shards=3)
    options = Options(method="gptq", statistics=tmp_path / "stats", smoothing=smoothing_of(tensors))
    plan = make_plan(source, options)
    run(plan, tmp_path / "one", ONE)
    run_on_cluster(plan, tmp_path / "d", InProcess(), ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "one")
    with pytest.raises(UnsupportedError, match="gptq and hessian on the CPU of its nodes; leave out --num-gpus-per"):
        run_on_cluster(plan, tmp_path / "e", InProcess(), replace(ONE, device="cuda"))


def test_a_part_has_the_fingerprints_of_its_shards(plan: Plan) -> None:
    """So that the journal of a cluster is that of one machine."""
    for shard in plan.shards:
        part = Parts(plan).make((shard.name,))
        (own,) = part.shards
        assert part.plan.shard_fingerprint(own) == plan.shard_fingerprint(shard)


def test_a_part_has_its_partners_and_no_more(plan: Plan) -> None:
    shared = next(group for group in plan.shared if any("gate_proj" in module for module in group))
    home = next(shard for shard in plan.shards if any(unit.module == shared[0] for unit in shard.units))
    part = Parts(plan).make((home.name,))
    modules = {unit.module for unit in part.plan.units}
    assert set(shared) <= modules
    own = {unit.module for unit in home.units}
    partners = {module for group in plan.groups if set(group) & own for module in group}
    assert modules <= own | partners
    assert part.bytes == shard_bytes(home)
    assert all(shard.copies == () and shard.header == b"" for shard in part.plan.shards if shard.name != home.name)


@pytest.mark.parametrize(("places", "parts"), [(1, 4), (2, 12), (100, 12)])
def test_small_shards_become_one_part_where_that_leaves_enough(tmp_path: Path, places: int, parts: int) -> None:
    """Twelve shards of one size: at least four parts for each place, and no part smaller than a shard."""
    tensors = {f"model.layers.{layer}.mlp.down_proj.weight": random(layer, 32, 32) for layer in range(12)}
    plan = plan_of(write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 12}, shards=12))
    cut = Parts(plan).cut(plan.shards, places)
    assert len(cut) == parts
    assert sorted(name for names in cut for name in names) == [shard.name for shard in plan.shards]


def test_the_largest_part_comes_first(plan: Plan) -> None:
    sizes = {shard.name: shard_bytes(shard) for shard in plan.shards}
    found = [sizes[name] for (name,) in Parts(plan).cut(plan.shards, 100)]
    assert found == sorted(sizes.values(), reverse=True)


def test_errors_of_halfbyte_are_part_of_the_answer(tmp_path: Path, plan: Plan) -> None:
    part = Parts(plan).make((plan.shards[0].name,))
    written = write_part(part, tmp_path, replace(ONE, device="cuda:99"), False)
    assert "device cuda:99" in written.error
    assert " (on " in written.error
    (plan.source / plan.shards[0].name).unlink()
    assert "cannot be read" in write_part(part, tmp_path, ONE, False).error


def test_what_earlier_attempts_left_is_removed(tmp_path: Path) -> None:
    for name in ("a.try-0123456789abcdef.part", "a.try-0123456789abcdef", "b.try-0123456789abcdef", "a", "a.part"):
        (tmp_path / name).touch()
    remove_attempts(tmp_path, ("a",), Disk())
    assert {path.name for path in tmp_path.iterdir()} == {"b.try-0123456789abcdef", "a", "a.part"}
    remove_attempts(tmp_path, None, Disk())
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.part"}


def test_what_a_node_sees(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "token").touch()
    first, second = plan.files[:2]
    (plan.source / first.name).unlink()
    (plan.source / second.name).touch()
    seen = see(plan.source, plan.files, tmp_path, "token")
    assert seen.work
    assert seen.files == {file.name for file in plan.files[2:]}
    assert not see(plan.source, plan.files, tmp_path, "another").work


def test_a_part_is_as_small_as_its_shards(tmp_path: Path) -> None:
    """A part of a plan of 80 shards is not the plan."""
    source = write_checkpoint(
        tmp_path / "s", llama(layers=30, hidden=32, inner=32), {"num_hidden_layers": 30}, shards=80
    )
    plan = plan_of(source)
    sizes = [len(pickle.dumps(Parts(plan).make((shard.name,)))) for shard in plan.shards]
    assert max(sizes) < len(pickle.dumps(plan)) / 8
