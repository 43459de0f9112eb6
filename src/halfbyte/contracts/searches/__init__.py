"""Searches for scales that belong to one peer."""
