"""Numbers to codes and back: elements, packing, blocks. Plain numpy, no choice of scales."""
