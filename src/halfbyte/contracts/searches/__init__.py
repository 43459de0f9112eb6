"""Searches for scales that one peer defines for itself."""
