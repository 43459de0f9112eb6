"""Encode numbers as codes and decode them: elements, packing, blocks. Plain numpy; no scale is chosen here."""
