"""Placeholder until the checks are written."""
CHECKS = {}
