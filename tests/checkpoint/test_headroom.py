"""Conversions and the headroom of Optimal: the bytes of `hb.quantize`, however the work is cut; groups share one."""

from __future__ import annotations
