"""Checkpoint files: headers, index, where matrices lie in them, reading and decoding."""
