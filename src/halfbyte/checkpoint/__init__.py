"""Checkpoints: plan from headers, run shard by shard with bounded memory, close with index, config and manifest."""
