"""MXFP8: w = e4m3 * 2**(e8m0 - 127).

| part | type | one per |
|---|---|---|
| element | E4M3, 8 bits, largest value 448 | weight |
| block scale | E8M0, a power of two from 2**-127 to 2**127 | 32 weights of a row |

8.25 bits per weight.
"""

from halfbyte.formats.elements import E4M3, E8M0
from halfbyte.formats.spec import BlockFormat

MXFP8 = BlockFormat(name="mxfp8", element=E4M3, scale=E8M0, block=32, has_global=False, blocks=(32,))
