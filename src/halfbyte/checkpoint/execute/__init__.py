"""Executing a Plan: tasks, workers, output files, journal and manifest."""
