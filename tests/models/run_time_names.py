"""Names on disk and at run time, ours against transformers' own, for whole architectures.

`python -m tests.models.run_time_names [CLASS…]` compares all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from halfbyte.models.architectures import find_architecture
from halfbyte.models.names import pattern_of
from tools.architectures.generate import architectures, build


def disk_names(model: Any) -> dict[str, Any]:
    """The tensors of a checkpoint of a model, as transformers would save it."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Any] = revert_weight_conversion(model, dict(model.state_dict()))
    return saved


def differences(name: str) -> Iterator[str]:
    """Tensors of a class whose name at run time we do not know, or that have no role."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    architecture = find_architecture({"architectures": [name]})
    assert architecture is not None, name
    model = next(build(name))
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    at_run_time = model.state_dict()
    seen = set()
    for tensor, values in sorted(disk_names(model).items()):
        if pattern_of(tensor) in seen or not (tensor.endswith(".weight") or "experts" in tensor):
            continue
        seen.add(pattern_of(tensor))
        wanted, _ = rename_source_key(tensor, renamings, converters, model.base_model_prefix, at_run_time)
        found = architecture.run_time(tensor).names[0]
        if found != wanted:
            yield f"{name}: {tensor} is {wanted} at run time, not {found}"
        if values.dim() == 2 and tensor.endswith(".weight") and not architecture.role(tensor.removesuffix(".weight")):
            yield f"{name}: {tensor} has no role"
    assert seen, name


def main() -> int:
    names = sys.argv[1:] or [name for name in architectures() if _has(name)]
    found = [difference for name in names for difference in differences(name)]
    print("\n".join(found))
    print(f"{len(names)} architectures, {len(found)} differences")
    return 1 if found else 0


def _has(name: str) -> bool:
    architecture = find_architecture({"architectures": [name]})
    return architecture is not None and architecture.name == name


if __name__ == "__main__":
    sys.exit(main())
