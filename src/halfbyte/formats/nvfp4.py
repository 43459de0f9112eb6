"""NVFP4: w = e2m1 * e4m3 * float32.

| part | type | one per |
|---|---|---|
| element | E2M1, 4 bits, largest value 6 | weight |
| block scale | E4M3, largest value 448 | 16 weights of a row |
| global scale | float32 | tensor, or row |

4.5 bits per weight.
"""

from halfbyte.formats.elements import E2M1, E4M3
from halfbyte.formats.spec import BlockFormat

NVFP4 = BlockFormat(name="nvfp4", element=E2M1, scale=E4M3, block=16, has_global=True, blocks=(16, 32))
