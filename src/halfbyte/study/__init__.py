"""The studies: the errors of the casts on 31 kinds of tensors, and of the quantization methods."""

from halfbyte.study.methods import MethodRow, run_methods
from halfbyte.study.run import Study, run_study
from halfbyte.study.scenarios import SCENARIOS, Scenario, get_scenario

__all__ = ["SCENARIOS", "MethodRow", "Scenario", "Study", "get_scenario", "run_methods", "run_study"]
