"""Checkpoints: plan from headers, run shard by shard with bounded memory, close with index, config and manifest."""

from halfbyte.checkpoint.execute.conversion import Outcome, Resources, run
from halfbyte.checkpoint.execute.pool import Event
from halfbyte.checkpoint.plan.planner import make_plan
from halfbyte.checkpoint.plan.select import Rules
from halfbyte.checkpoint.plan.types import Options, Plan

__all__ = ["Event", "Options", "Outcome", "Plan", "Resources", "Rules", "make_plan", "run"]
