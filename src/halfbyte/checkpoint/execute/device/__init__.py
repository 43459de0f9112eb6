"""Conversion on GPUs: what runs there, in which memory, and on which of several."""
