"""MXFP4: w = e2m1 * 2**(e8m0 - 127).

| part | type | one per |
|---|---|---|
| element | E2M1, 4 bits, largest value 6 | weight |
| block scale | E8M0, a power of two from 2**-127 to 2**127 | 32 weights of a row |

4.25 bits per weight.
"""

from halfbyte.formats.elements import E2M1, E8M0
from halfbyte.formats.spec import BlockFormat

MXFP4 = BlockFormat(name="mxfp4", element=E2M1, scale=E8M0, block=32, has_global=False, blocks=(16, 32))
