"""Checkpoint files: headers and index, places of matrices in them, reading and decoding."""
