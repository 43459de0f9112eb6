"""A checkpoint against its source: every value decoded, its error measured, and damage named by its place."""
