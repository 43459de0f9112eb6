"""Checkpoints: plan from headers, run shard by shard with bounded memory, close with index, config and manifest."""

from halfbyte.checkpoint.plan import Options, Plan
from halfbyte.checkpoint.planner import make_plan
from halfbyte.checkpoint.run import Event, Outcome, Resources, run
from halfbyte.checkpoint.select import Rules

__all__ = ["Event", "Options", "Outcome", "Plan", "Resources", "Rules", "make_plan", "run"]
