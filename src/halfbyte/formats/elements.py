"""The small floats, as literals. Values, maxima and special codes are derived in spec.py."""

from halfbyte.formats.spec import ElementFormat

# OCP Microscaling Formats v1.0, section 5.3.3: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no NaN, no Inf.
E2M1 = ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1)

# OCP 8-bit Floating Point v1.0, E4M3: no Inf, NaN is S.1111.111, largest finite value 448.
E4M3 = ElementFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, has_nan=True)

# OCP Microscaling Formats v1.0, section 5.4.1: 2**(code - 127), code 255 is NaN, no sign, no zero.
E8M0 = ElementFormat(
    name="e8m0", exponent_bits=8, mantissa_bits=0, bias=127, signed=False, has_subnormals=False, has_nan=True
)

ELEMENTS = {element.name: element for element in (E2M1, E4M3, E8M0)}
