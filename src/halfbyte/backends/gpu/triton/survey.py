"""How much headroom a tensor scale gets: every candidate h takes h times the amax for the amax. (backends/headroom.py)

`amax_blocks` finds the amax of the tensor and of every block, `prepare_candidates` what each candidate makes of it, and
`survey` the error of the blocks under each: the sum of floor(E·4**(k_h − k_1)·2**16) over blocks, an exact integer. The
last program of a group decides, and leaves behind what `prepare` writes for one amax.

Twice the amax only moves the exponent of every scale. So each block has the same best scale and the same error under 1
and 2, but for a few, and `survey` searches these few alone:

- blocks that some scale beyond 448 times the smaller multiplier is allowed for: 7/2 of the smallest such scale, which
  is 480, is below their amax;
- blocks for which a scale may win that only one of the two has. These scales are below t: 2**-5, the smallest scale
  that is normal under 2, or twice the contract's smallest one. If the amax M of a block exceeds 48·t, such a scale
  clips all that is larger than M/8. Compare s, the first scale from M/6 on, which both have and which is at most
  3/16·M: up to M/4 elements are off by at most s/4, together by less than 0.07·M**2; larger ones are off by less than
  under the small scale; and M itself, off by at most s, is off by 7/8·M or more there. So s costs less.

This holds where the numbers of both candidates are ordinary and differ by exactly two; `_differ_by_two` asks. Elsewhere
all blocks are searched.

A block of the first kind never costs more under 2 than under 1. So if there is none of the second kind, and nothing but
the better candidate is asked for, the first block that costs less under 2 decides: programs search under both
candidates until one of them has found such a block.

If a probe decides whether there are candidates besides 1 and 2, a launch before finds the totals of a sample under all.
"""

import triton
import triton.language as tl

from halfbyte.backends.gpu.triton.blocks import (
    decode_e4m3,
    float_of,
    largest,
    load_words,
    round_e4m3,
    unpack,
)
from halfbyte.backends.gpu.triton.numbers import (
    AMAX,
    BF16,
    FLOAT32_MAX,
    FP32,
    LISTED,
    MOST_PARTS,
    NOT_STORED,
    NUMBERS,
    PRESCALE,
    PRESCALE_AGAIN,
    ROWS,
    SEARCHED,
    UNIT,
    WEIGHTED,
    WORDS,
)
from halfbyte.backends.gpu.triton.scales import (
    as_float32_bits,
    element,
    element_constant,
    largest_bits,
    number,
    usable_amax,
    write_numbers,
)
from halfbyte.backends.gpu.triton.search import exact_search, quarters_of, scaled_values

NONE: tl.constexpr = tl.constexpr(0x7F7F0000)
"""Of no block: above every amax that a tensor scale can be made for, but for the largest ones, which are above too."""

# --- amaxes of blocks ---


@triton.jit
def _members(x_ptr, group, group_blocks, MAP: tl.constexpr):
    """The blocks of a group: the address that words are counted from, the first block among all, and how many."""
    if MAP == LISTED:
        base = tl.multiple_of(tl.load(x_ptr + 3 * group).to(tl.pointer_type(tl.int32)), 16)
        return base, tl.load(x_ptr + 3 * group + 2), tl.load(x_ptr + 3 * group + 1)
    else:
        return x_ptr, group * group_blocks, group_blocks


@triton.jit
def _first_word(local, first, columns, row_quads, W: tl.constexpr, MAP: tl.constexpr):
    """Where the words of a block begin, and its column. `local`: its number in the group; first: that of the group."""
    block = first + local
    if MAP == LISTED:
        return local * W, local
    elif MAP == ROWS:
        row = block // columns
        column = block - row * columns
        return row * (row_quads * 4) + column * W, column
    else:
        return block * W, block


@triton.jit(do_not_specialize=["columns", "row_quads", "group_blocks", "parts"])
def amax_blocks(
    x_ptr, out_ptr, least_ptr, block_ptr, columns, row_quads, group_blocks, parts,
    B: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of `parts` parts of each group as float32 bits, and of every block the upper half of them.

    least_ptr gets the smallest upper half of a part that is not zero, in its place, or NONE. Integers order like
    magnitudes, with NaN above Inf. Loads come first, because stores could change what they find.
    """
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    pid = tl.program_id(0).to(tl.int64)
    base, first, blocks = _members(x_ptr, pid // parts, group_blocks, MAP)
    lane = tl.arange(0, B)
    most = tl.zeros((B,), tl.int32)
    least = tl.full((B,), NONE, tl.int32)
    for start in range((pid % parts) * (B * DEPTH), blocks, parts * (B * DEPTH)):
        loaded = ()
        for i in tl.static_range(DEPTH):
            local = start + i * B + lane
            at, column = _first_word(local, first, columns, row_quads, W, MAP)
            loaded = loaded + load_words(base + at, local < blocks, W)
        for i in tl.static_range(DEPTH):
            local = start + i * B + lane
            bits = largest_bits(loaded[i * W], DTYPE)
            for j in tl.static_range(1, W):
                bits = tl.maximum(bits, largest_bits(loaded[i * W + j], DTYPE))
            bits = as_float32_bits(bits, DTYPE)
            most = tl.maximum(most, bits)
            upper = bits & -65536
            least = tl.minimum(least, tl.where((upper > 0) & (local < blocks), upper, NONE))
            tl.store(block_ptr + first + local, (bits >> 16).to(tl.int16), mask=local < blocks)
    tl.store(out_ptr + pid, tl.max(most, axis=0))
    tl.store(least_ptr + pid, tl.min(least, axis=0))


# --- candidates ---


@triton.jit(do_not_specialize=["parts", "given"])
def prepare_candidates(
    amax_ptr, least_ptr, headroom_ptr, numbers_ptr, stored_ptr, multiplier_ptr, totals_ptr, sampled_ptr, done_ptr,
    lowest_ptr, parts, given,
    TOP: tl.constexpr, KIND: tl.constexpr, STATISTICS: tl.constexpr, CONSTANT: tl.constexpr, STORED: tl.constexpr,
    MULTIPLIER: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr, GIVEN: tl.constexpr, REPAIRS: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """What `prepare` writes, for each of COUNT candidates of each group; their totals become zero.

    SAMPLES: 0 if no sample is added up, 1 if one is for all groups, 2 if one is for each.

    amax_ptr, least_ptr: `parts` partial amaxes of every group, and its smallest amaxes of blocks, of which the least
    goes to lowest_ptr. GIVEN: the bits `given` for the amax of all groups.
    """
    pid = tl.program_id(0).to(tl.int64)
    if GIVEN:
        bits = tl.full((1,), 0, tl.int32) + given.to(tl.int32)
    else:
        bits = tl.full((1,), 0, tl.int32)
        for start in range(0, parts, MOST_PARTS):
            at = start + tl.arange(0, MOST_PARTS)
            found = tl.load(amax_ptr + (pid // COUNT) * parts + at, mask=at < parts, other=0)
            bits = tl.maximum(bits, tl.max(found, axis=0))
    lowest = tl.full((), NONE, tl.int32)
    for start in range(0, parts, MOST_PARTS):
        at = start + tl.arange(0, MOST_PARTS)
        found = tl.load(least_ptr + (pid // COUNT) * parts + at, mask=at < parts, other=NONE)
        lowest = tl.minimum(lowest, tl.min(found, axis=0))
    tl.store(lowest_ptr + pid // COUNT, lowest)
    headroom = tl.load(headroom_ptr + pid % COUNT).to(tl.float64, bitcast=True)
    amax = usable_amax(bits, REPAIRS)
    widened = tl.where(amax == amax, (amax.to(tl.float64) * headroom).to(tl.float32), amax)  # NaN keeps its bits
    if REPAIRS:  # a raised amax has no headroom: other candidates than 1 are left out
        raised = (amax != float_of(bits)) & (amax == amax)
        widened = tl.where(raised, tl.where(headroom == 1.0, amax, float("nan")), widened)
    group = pid + tl.arange(0, 1)
    write_numbers(
        widened, group, group == group, numbers_ptr, stored_ptr, multiplier_ptr,
        TOP, KIND, STATISTICS, CONSTANT, STORED, MULTIPLIER, DTYPE,
    )  # fmt: skip
    for i in tl.static_range(WORDS):
        tl.store(totals_ptr + WORDS * pid + i, pid * 0)
        if SAMPLES > 0:
            tl.store(sampled_ptr + WORDS * pid + i, pid * 0, mask=(SAMPLES > 1) | (pid < COUNT))
    tl.store(done_ptr + pid // COUNT, (pid * 0).to(tl.int32))


@triton.jit
def _is_candidate(numbers_ptr, which):
    """Whether amax and multiplier are positive and finite."""
    amax = number(numbers_ptr, which, AMAX)
    return (number(numbers_ptr, which, SEARCHED) > 0) & (amax > 0) & (amax <= FLOAT32_MAX)


@triton.jit
def _power(numbers_ptr, which):
    """2**-k, which no float32 can hold for the smallest multipliers."""
    first = number(numbers_ptr, which, PRESCALE).to(tl.float64)
    return first * number(numbers_ptr, which, PRESCALE_AGAIN).to(tl.float64)


@triton.jit
def _differ_by_two(numbers_ptr, one, two, ELEMENT: tl.constexpr):
    """Whether all of the second candidate's numbers are ordinary and twice the first one's, and y is x'/s'."""
    amax = number(numbers_ptr, one, AMAX)
    ordinary = (amax >= 8.077935669463161e-28) & (amax <= 1.2379400392853803e27)  # 2**-90, 2**90
    unit, power = number(numbers_ptr, one, UNIT), _power(numbers_ptr, one)
    doubled = (unit == number(numbers_ptr, two, UNIT)) & (power == 2.0 * _power(numbers_ptr, two))
    scale = tl.full((), 1.0, tl.float32)
    constant = element_constant(scale, numbers_ptr, one, ELEMENT)
    same = element_constant(scale * 2.0, numbers_ptr, one, ELEMENT) == element_constant(
        scale, numbers_ptr, two, ELEMENT
    )
    y = element((unit.to(tl.float64) / power).to(tl.float32), constant, scale, ELEMENT)
    return ordinary & doubled & same & (tl.abs(y - 1.0) <= 0.00390625) & (number(numbers_ptr, one, SEARCHED) > 0)


# --- errors ---


@triton.jit
def _rounded_errors(
    x_ptr, weights_ptr, numbers_ptr, which, local, exists, first, columns, row_quads, to_integer,
    N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, SHORT: tl.constexpr, OBJECTIVE: tl.constexpr,
    FIRST: tl.constexpr, ELEMENT: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Least errors of blocks under one candidate as whole float64; 0 for blocks that are not searched."""
    W: tl.constexpr = N if DTYPE == FP32 else N // 2
    at, column = _first_word(local, first, columns, row_quads, W, MAP)
    x = unpack(load_words(x_ptr + at, exists, W), W, DTYPE)
    v = largest(x, N)
    searched = exists & (v > 0) & (v <= FLOAT32_MAX)
    unit = number(numbers_ptr, which, UNIT)
    scaled = scaled_values(x, numbers_ptr, which, N)
    quarters = quarters_of(scaled, N)
    most = tl.maximum(tl.maximum(quarters[0], quarters[1]), tl.maximum(quarters[2], quarters[3]))
    weights = ()
    if OBJECTIVE == WEIGHTED:
        for i in tl.static_range(N):
            weights = weights + (tl.load(weights_ptr + column * N + i, mask=exists, other=0.0),)
    nearest, value = round_e4m3(tl.where(searched, most / (unit * 6.0), 1.0))
    nearest = tl.maximum(nearest, FIRST)
    last, value = round_e4m3(tl.where(searched, most / (unit * 3.5), 1.0))
    last = tl.minimum(tl.maximum(last, 16), 126)
    byte, error = exact_search(
        x, scaled, quarters, weights, nearest, most, unit, nearest, last, searched, numbers_ptr, which, N, SHORT,
        OBJECTIVE, FIRST, ELEMENT, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS,
    )  # fmt: skip
    error = tl.where(searched, tl.minimum(error, FLOAT32_MAX), 0.0)
    return tl.floor(error.to(tl.float64) * to_integer)


@triton.jit
def _add(words, n):
    """Add whole numbers of float64 to a sum in words of 32 bits. An error has 24 bits, so everything is exact."""
    sums = ()
    above = n
    for i in tl.static_range(WORDS):
        rest = above
        above = tl.floor(rest * 2.3283064365386963e-10)  # 2**-32
        sums = sums + (words[i] + tl.sum((rest - above * 4294967296.0).to(tl.int64), axis=0),)
    return sums


@triton.jit(
    do_not_specialize=[
        "columns", "row_quads", "group_blocks", "parts", "tiles", "share", "programs", "all_blocks", "step",
        "sample_first",
    ]
)  # fmt: skip
def survey(
    x_ptr, weights_ptr, block_ptr, queue_ptr, numbers_ptr, stored_ptr, multiplier_ptr, totals_ptr, sampled_ptr,
    done_ptr, lowest_ptr, out_numbers_ptr, out_stored_ptr, out_multiplier_ptr,
    columns, row_quads, group_blocks, parts, tiles, share, programs, all_blocks, step, sample_first,
    B: tl.constexpr, TILE: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, MAP: tl.constexpr, SHORT: tl.constexpr,
    OBJECTIVE: tl.constexpr, COUNT: tl.constexpr, COMPETES: tl.constexpr, SOME: tl.constexpr, DECIDES: tl.constexpr,
    SAMPLE: tl.constexpr, BY_ROW: tl.constexpr, PROBED: tl.constexpr, TWO: tl.constexpr, LESS: tl.constexpr,
    OF: tl.constexpr,
    STORED: tl.constexpr, FIRST: tl.constexpr, ELEMENT: tl.constexpr, TIE: tl.constexpr, SIGN: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_INPUT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Adds the errors of blocks under candidate program_id(1) to its total. The last program of a group decides.

    A group has `parts` parts of `tiles` tiles of TILE blocks. Every `share` groups have one scale, for which `programs`
    programs run. SOME: of the candidates 1 and TWO only some blocks are searched: a program writes the numbers of
    these to its own place at queue_ptr, whole warps of them are searched at a time. DECIDES: the numbers of the best
    candidate are written for all groups; otherwise the totals are all that is wanted. With both, and without blocks at
    the bottom, the programs of candidate 1 search under both, and its total counts the blocks found that gain.

    SAMPLE: of each group every `step`-th block counts, from sample_first on; or if BY_ROW, all of every `step`-th
    group, whose totals are added, but for groups that leave a candidate out. PROBED: candidates besides 1 and TWO are
    left out unless the sample speaks for one of them; if it does, all blocks are searched under all.
    """
    pid = tl.program_id(0).to(tl.int64)
    candidate = tl.program_id(1).to(tl.int64)
    group = pid // parts
    if SAMPLE and BY_ROW:
        group = group * step
    base, first, blocks = _members(x_ptr, group, group_blocks, MAP)
    one = (group // share) * COUNT
    which = one + candidate
    into = which
    counts = _is_candidate(numbers_ptr, which)
    if SAMPLE and BY_ROW:
        into = candidate
        for i in tl.static_range(COUNT):
            counts = counts & _is_candidate(numbers_ptr, one + i)
    elif SAMPLE:
        blocks = (blocks - sample_first + step - 1) // step
    wanted = tl.full((), 1, tl.int32)
    if PROBED:
        wanted = _is_wanted(numbers_ptr, sampled_ptr, one, COUNT, BY_ROW, TWO, LESS, OF).to(tl.int32)
        counts = counts & ((wanted > 0) | (candidate == 0) | (candidate == TWO))
    begin = (pid % parts) * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, blocks)
    own = tl.where(number(numbers_ptr, one, SEARCHED) > 0, _power(numbers_ptr, one), 2.0)  # k of no multiplier is −1
    words = (pid * 0, pid * 0, pid * 0, pid * 0, pid * 0)
    count = tl.maximum(end - begin, 0)
    own_queue = queue_ptr + candidate * all_blocks + first + begin
    from_candidate, to_candidate = candidate, candidate + 1
    quick = tl.full((), 0, tl.int32)
    if SOME:
        some = _differ_by_two(numbers_ptr, one, one + TWO, ELEMENT).to(tl.int32)
        if PROBED:
            some = some * (1 - wanted)
        count = tl.where(counts, count, 0)
        if DECIDES:
            quick = some * _is_above(tl.load(lowest_ptr + group // share), numbers_ptr, one, FIRST)
            if quick > 0:
                from_candidate, to_candidate = candidate * 0, candidate * 0 + 2
                count = tl.where(_is_settled(totals_ptr, one) | (candidate > 0), 0, count)
        if (some > 0) & (count > 0):
            count = _queue_some(block_ptr + first, own_queue, numbers_ptr, one, begin, end, TILE, DTYPE, FIRST)
    if counts:
        start = count * 0
        while start < count:
            entry = start + tl.arange(0, B)
            exists = entry < count
            if SOME:
                found = tl.load(own_queue + entry, mask=entry < count * some, other=0).to(tl.int64) & 0xFFFF
                local = begin + tl.where(some > 0, found, entry)
            elif SAMPLE and not BY_ROW:
                local = sample_first + (begin + entry) * step
            else:
                local = begin + entry
            n = tl.zeros((B,), tl.float64)
            for tried in range(from_candidate, to_candidate):
                under = one + tl.where((quick > 0) & (tried > 0), TWO, tried)
                ratio = own / _power(numbers_ptr, under)
                found_n = _rounded_errors(
                    base, weights_ptr, numbers_ptr, under, local, exists, first, columns, row_quads,
                    ratio * ratio * 65536.0, N, DTYPE, MAP, SHORT, OBJECTIVE, FIRST, ELEMENT, TIE, SIGN, NAN_CODE,
                    ZERO_INPUT, WRAPS,
                )  # fmt: skip
                n = tl.where((quick > 0) & (tried > 0), n - found_n, found_n)
            words = _add(words, tl.where(quick > 0, (n > 0).to(tl.float64), n))
            settled = (quick > 0) & ((words[0] > 0) | _is_settled(totals_ptr, one))
            start = tl.where(settled, count, start + B)
    for i in tl.static_range(WORDS):
        if words[i] > 0:
            tl.atomic_add(totals_ptr + WORDS * into + i, words[i])
    if DECIDES:
        tl.debug_barrier()  # what the whole program has added comes before the count
        before = tl.atomic_add(done_ptr + group // share, 1)
        if before == programs - 1:
            best = _best(numbers_ptr, totals_ptr, one, wanted, COUNT, COMPETES, TWO)
            _copy(
                numbers_ptr, stored_ptr, multiplier_ptr, best, out_numbers_ptr, out_stored_ptr, out_multiplier_ptr,
                (group // share) * share, share, STORED,
            )  # fmt: skip


@triton.jit
def _is_settled(totals_ptr, one):
    """Whether a program has found a block that gains."""
    return tl.load(totals_ptr + WORDS * one, volatile=True) > 0


@triton.jit
def _bottom(numbers_ptr, one, FIRST: tl.constexpr):
    """Blocks with an amax up to this, scaled as values are, may have a scale that only one candidate has."""
    least = decode_e4m3(tl.full((), FIRST, tl.int32))
    return 48.01 * tl.maximum(0.03125, 2.0 * least) * number(numbers_ptr, one, UNIT)


@triton.jit
def _is_above(lowest, numbers_ptr, one, FIRST: tl.constexpr):
    """1 if the smallest amax of a block, by its upper half, is above the bottom; otherwise 0."""
    scaled = (float_of(lowest) * number(numbers_ptr, one, PRESCALE)) * number(numbers_ptr, one, PRESCALE_AGAIN)
    return ((scaled > _bottom(numbers_ptr, one, FIRST)) | (lowest == NONE)).to(tl.int32)


@triton.jit
def _queue_some(
    block_ptr, queue_ptr, numbers_ptr, one, begin, end, TILE: tl.constexpr, DTYPE: tl.constexpr, FIRST: tl.constexpr
):
    """Write the numbers (from `begin` on) of the blocks that may differ under the two candidates; how many there are.

    Of an amax only the upper half is known, so of float16 and float32 a few blocks more are taken. Amaxes whose upper
    half is zero are too small to count: their integers are 0.
    """
    unit = number(numbers_ptr, one, UNIT)
    prescale, again = number(numbers_ptr, one, PRESCALE), number(numbers_ptr, one, PRESCALE_AGAIN)
    top = 7.0 * (240.0 * unit)  # half of the smallest scale beyond 448, which is 480
    bottom = _bottom(numbers_ptr, one, FIRST)
    queued = begin * 0
    for start in range(begin, end, TILE):
        local = start + tl.arange(0, TILE)
        bits = tl.load(block_ptr + local, mask=local < end, other=0).to(tl.int32) << 16
        atop = (float_of(bits + (0 if DTYPE == BF16 else 65536)) * prescale) * again
        taken = (bits > 0) & ((atop > top) | ((float_of(bits) * prescale) * again <= bottom))
        chosen = taken.to(tl.int32)
        place = queued + tl.cumsum(chosen, axis=0) - chosen
        tl.store(queue_ptr + place, (local - begin).to(tl.int16), mask=taken)
        queued += tl.sum(chosen, axis=0)
    tl.debug_barrier()  # lanes read what others wrote
    return queued


@triton.jit
def _is_wanted(
    numbers_ptr, sampled_ptr, one, COUNT: tl.constexpr, BY_ROW: tl.constexpr, TWO: tl.constexpr, LESS: tl.constexpr,
    OF: tl.constexpr,
):  # fmt: skip
    """Whether a sample speaks for a candidate besides 1 and TWO. (backends/headroom.py: Trial.finds)"""
    sample = one * 0 if BY_ROW else one
    usable = one == one
    found = one != one
    first = _total(sampled_ptr, sample, LESS)
    second = _total(sampled_ptr, sample + TWO, LESS)
    for i in tl.static_range(COUNT):
        if not BY_ROW:  # a row that leaves a candidate out is not in the sample
            usable = usable & _is_candidate(numbers_ptr, one + i)
        if (i > 0) & (i != TWO):
            total = _total(sampled_ptr, sample + i, OF)
            found = found | (_is_less(total, first) & _is_less(total, second))
    return usable & found


@triton.jit
def _is_less(total, other):
    less = total[0] < other[0]
    for i in tl.static_range(1, WORDS):
        less = (total[i] < other[i]) | ((total[i] == other[i]) & less)
    return less


@triton.jit
def _total(totals_ptr, which, TIMES: tl.constexpr):
    """The words of a total times a small number, with what they carry over."""
    words = ()
    carried = which * 0
    for i in tl.static_range(WORDS):
        sum = tl.load(totals_ptr + WORDS * which + i, volatile=True) * TIMES + carried
        carried = sum >> 32
        words = words + (sum & 0xFFFFFFFF,)
    return words


@triton.jit
def _best(
    numbers_ptr, totals_ptr, one, wanted, COUNT: tl.constexpr, COMPETES: tl.constexpr, TWO: tl.constexpr
):  # fmt: skip
    """The candidate of least total, the first of equals. wanted: 0 if only 1 and TWO are candidates.

    COMPETES: the first one counts whatever its numbers are. Otherwise it is taken only if no other can be.
    """
    best = one
    least = _total(totals_ptr, one, 1)
    found = (one == one) & COMPETES
    for i in tl.static_range(1, COUNT):
        total = _total(totals_ptr, one + i, 1)
        taken = _is_candidate(numbers_ptr, one + i) & (_is_less(total, least) | (found == 0))
        if i != TWO:
            taken = taken & (wanted > 0)
        best = tl.where(taken, one + i, best)
        found = found | taken
        kept = ()
        for j in tl.static_range(WORDS):
            kept = kept + (tl.where(taken, total[j], least[j]),)
        least = kept
    return best


@triton.jit
def _copy(
    numbers_ptr, stored_ptr, multiplier_ptr, best, out_numbers_ptr, out_stored_ptr, out_multiplier_ptr, first, share,
    STORED: tl.constexpr,
):  # fmt: skip
    """The numbers of a candidate, for all groups that share it."""
    lane = tl.arange(0, NUMBERS)
    numbers = tl.load(numbers_ptr + best * NUMBERS + lane)
    multiplier = tl.load(multiplier_ptr + best)
    for member in range(first, first + share):
        tl.store(out_numbers_ptr + member * NUMBERS + lane, numbers)
        tl.store(out_multiplier_ptr + member, multiplier)
        if STORED != NOT_STORED:
            tl.store(out_stored_ptr + member, tl.load(stored_ptr + best))
