"Deltas: exact for every dtype and pattern, refused when they are not what an encoder writes"
import struct, tracemalloc
from unittest import mock

import msgspec, numpy as np, pytest, zstandard
from hypothesis import HealthCheck, given, settings, strategies as st

from laminar_sdk.core.errors import ConfigError, IntegrityError
from laminar_sdk.weights import delta
from laminar_sdk.weights.delta import BLOCK, DENSELY, HEADER, RAW, SAME, SPARSELY, Rates, apply, arrival, cells, encode, estimate, head
from laminar_sdk.weights.layout import DTYPE_BYTES, Layout, TensorSpec

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
level1 = delta._compressor(1)


def pack(*streams): return delta._pack(level1, *streams)


@st.composite
def layouts(draw, most=3000):
    "Tensors of any dtype, also empty ones and scalars, also without alignment, also with a gap in front"
    shapes = st.lists(st.integers(0, most), max_size=1).map(tuple)
    named = draw(st.dictionaries(st.sampled_from('abcdefg'), st.tuples(st.sampled_from(list(DTYPE_BYTES)), shapes)))
    layout, gap = Layout.of(named, align=draw(st.sampled_from([1, 2, 64]))), draw(st.sampled_from([0, 0, 3, 64]))
    return Layout(tuple(msgspec.structs.replace(t, offset=t.offset + gap) for t in layout.tensors), layout.nbytes + 2*gap)


SPECIAL = np.array([0, 1, 0x7F, 0x80, 0xFF], 'u1') # NaNs, infinities, -0.0 and the like are made of these bytes

@st.composite
def pairs(draw):
    "A layout and two images of it that differ in none, some or all elements, by little or by everything"
    layout, rng = draw(layouts()), np.random.default_rng(draw(st.integers(0, 2**32)))
    make = draw(st.sampled_from([lambda n: rng.integers(0, 256, n, 'u1'), lambda n: rng.choice(SPECIAL, n), lambda n: np.zeros(n, 'u1')]))
    old = make(layout.nbytes)
    new, rate, how = old.copy(), draw(st.sampled_from([0, 1e-3, .02, .3, .36, .6, 1])), draw(st.sampled_from(['step', 'sign', 'any']))
    for t in layout.tensors:
        bits = f'<u{DTYPE_BYTES[t.dtype]}'
        x = new[t.offset:t.end].view(bits)
        hit = np.flatnonzero(rng.random(x.size) < rate)
        if how == 'step': x[hit] += rng.integers(-3, 4, hit.size).astype(bits) # wraps at both ends
        elif how == 'sign': x[hit] ^= np.array(1, bits) << (8*x.itemsize - 1)
        else: x[hit] = rng.choice(SPECIAL, hit.size * x.itemsize).view(bits)
    return layout, old, new


def applied(blocks, old, layout, out=None):
    out, at = np.full(layout.nbytes, 0xAA, 'u1') if out is None else out, 0
    for block in blocks:
        assert len(block) == head(block).size <= HEADER + BLOCK
        at = apply(block, old, out, layout, at)
    assert at == layout.nbytes
    return out


@FEW
@given(pairs(), st.sampled_from([64, 1000, 4096, BLOCK]), st.sampled_from([0, 512, delta.SMALL]), st.sampled_from([3, 100, delta.PIECE]))
def test_any_change_of_any_layout_comes_back(pair, block, small, piece):
    layout, old, new = pair
    with mock.patch.multiple(delta, BLOCK=block//8*8, SMALL=small, WINDOW=64, PIECE=piece):
        blocks = list(encode(old.tobytes(), new, layout))
        assert (applied(map(memoryview, blocks), old, layout) == new).all()
        assert sum(map(len, blocks)) <= new.size + HEADER * (1 + sum(1 for _ in cells(layout)))
        if layout.nbytes and (old == new).all(): assert len(blocks) == 1 and len(blocks[0]) == HEADER
        assert 0 <= estimate(old, new, layout)


@pytest.mark.parametrize('rate', [0, 1e-4, .05, .3, 1])
@pytest.mark.parametrize('dtype', DTYPE_BYTES)
def test_every_dtype_in_several_blocks(dtype, rate):
    "Over the real block size, with small tensors of other dtypes between; and never more than 101 % of the full bytes"
    rng, width = np.random.default_rng(0), DTYPE_BYTES[dtype]
    layout = Layout.of(dict(a=('float32', (7,)), b=(dtype, (5_000_000//width,)), c=('bool', ()), d=(dtype, (0, 3)), e=(dtype, (300_000,))))
    old = rng.integers(0, 256, layout.nbytes, 'u1')
    new = old.copy()
    x = new[:layout.nbytes//8*8].view(f'<u{width}')
    hit = np.flatnonzero(rng.random(x.size) < rate)
    x[hit] = rng.integers(0, 256, hit.size * width, 'u1').view(x.dtype)
    blocks = list(encode(old, new, layout))
    assert (applied(blocks, old, layout) == new).all()
    assert sum(map(len, blocks)) <= 1.01 * layout.nbytes


def test_special_values_of_bf16_in_every_mode():
    layout = Layout.of(dict(w=('bfloat16', (4000,))))
    specials = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0xFFFF, 0x7FFF], '<u2')
    for mode, hit in (SPARSELY, slice(0, 400)), (DENSELY, slice(None, None, 2)):
        old = np.zeros(layout.nbytes//2, '<u2')
        new = old.copy()
        new[hit] = np.resize(specials, new[hit].size)
        block, = encode(old, new, layout)
        assert head(block).mode == mode and (applied([block], old, layout).view('<u2') == new).all()
        back, = encode(new, old, layout)
        assert (applied([back], new, layout).view('<u2') == old).all()


def test_a_hundred_versions_one_on_the_other():
    rng, layout = np.random.default_rng(1), Layout.of(dict(w=('bfloat16', (30_000,)), n=('float32', (20_000,))))
    there = rng.integers(0, 256, layout.nbytes, 'u1')
    here, spare = there.copy(), np.full(layout.nbytes, 0xAA, 'u1')
    for i in range(100):
        new, x = there.copy(), None
        x = new.view('<u2')
        hit = np.flatnonzero(rng.random(x.size) < rng.choice([0, .001, .03, .2, .9]))
        x[hit] += rng.integers(-2, 3, hit.size).astype('<u2')
        here, spare = applied(encode(there, new, layout), here, layout, spare), here # two segments take turns
        assert (here == new).all(), i
        there = new


LAYOUT = Layout.of(dict(w=('bfloat16', (1000,))))
OLD = np.random.default_rng(2).integers(0, 60000, LAYOUT.nbytes//2, '<u2')

def changed(n):
    new = OLD.copy()
    new[:n] += 1
    return new

BLOCKS = {'same': [*encode(OLD, OLD, LAYOUT)], 'sparse': [*encode(OLD, changed(50), LAYOUT)], 'dense': [*encode(OLD, changed(900), LAYOUT)],
          'raw': [*encode(OLD, np.random.default_rng(3).integers(0, 65536, OLD.size, '<u2'), LAYOUT)]}


def refused(block, layout=LAYOUT, at=None):
    "Raises, and neither the image nor its surroundings are touched"
    whole = bytearray(b'\xAA' * (layout.nbytes + 2*4096))
    with pytest.raises(IntegrityError) as e: apply(block, OLD, memoryview(whole)[4096:-4096], layout, at)
    assert whole == b'\xAA' * len(whole) and e.value.remedy
    return e.value.message


@pytest.mark.parametrize('mode', BLOCKS)
def test_every_flipped_bit_and_every_cut_is_refused(mode):
    block, = BLOCKS[mode]
    assert head(block).mode == list(BLOCKS).index(mode)
    places = range(len(block)) if len(block) < 300 else [*range(HEADER + 40), *range(HEADER + 40, len(block), 37), len(block) - 1]
    for i in places:
        bad = bytearray(block)
        bad[i] ^= 1 << i % 8
        refused(bad)
        refused(block[:i])
    refused(block + b'\0')


@FEW
@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_refused(noise, magic): refused(delta.MAGIC*magic + noise)


@FEW
@given(st.sampled_from([SPARSELY, DENSELY, RAW, SAME, 4, 255]), st.sampled_from([0, 1, 2, 3, 4, 8]), st.integers(0, 2**64 - 1) | st.integers(0, 3000),
       st.integers(0, 2**64 - 1) | st.integers(0, 3000), st.binary(max_size=60) | st.lists(st.binary(max_size=400), max_size=5))
def test_a_liar_who_can_count_changes_at_most_what_he_names(mode, width, offset, nbytes, payload):
    "Whoever has the run's secret can make sums that hold: nothing beyond the range is written, and nothing at all unless it is well formed"
    if isinstance(payload, list): payload = pack(*(np.frombuffer(p, 'u1') for p in payload))
    block = delta._seal(mode, width, offset, nbytes, payload)
    whole = bytearray(b'\xAA' * (LAYOUT.nbytes + 2*4096))
    inside = memoryview(whole)[4096:-4096]
    try: end = apply(block, OLD, inside, LAYOUT)
    except IntegrityError: assert whole == b'\xAA' * len(whole)
    else:
        assert end == offset + nbytes <= LAYOUT.nbytes
        assert whole[:4096 + offset] == b'\xAA' * (4096 + offset) and whole[4096 + end:] == b'\xAA' * (LAYOUT.nbytes - end + 4096)


@pytest.mark.parametrize('mode, width, offset, nbytes, payload', [
    (SAME, 1, 0, 0, b''), (SAME, 1, 0, 8, b'x'), (SAME, 2, 0, 7, b''), (SAME, 8, 0, 12, b''), (SAME, 1, 2**64 - 1, 2, b''), (SAME, 1, 1993, 56, b''),
    (RAW, 2, 0, 8, b'7 bytes'), (RAW, 2, 0, 7, b'7 bytes'), (RAW, 3, 0, 9, b'9 bytes..'), (RAW, 0, 0, 4, b'four'), (RAW, 1, 2047, 4, b'four'),
    (RAW, 1, 0, 2*BLOCK, bytes(8)), (SPARSELY, 2, 0, 4, b'longer than raw'), (4, 1, 0, 4, b'four')])
def test_headers_that_cannot_be(mode, width, offset, nbytes, payload): refused(delta._seal(mode, width, offset, nbytes, payload))


def u1(*x): return np.array(x, 'u1')
def u4(*x): return np.array(x, '<u4')
def u2(*x): return np.array(x, '<u2')
none = u1()

@pytest.mark.parametrize('why, mode, streams', [
    ('index beyond the block', SPARSELY, (np.full(4, 250, 'u1'), none, u1(1, 1, 1, 1), none)),
    ('far index', SPARSELY, (u1(255), u4(2**32 - 1), u1(1), none)),
    ('a far gap too few', SPARSELY, (u1(255, 255), u4(256), u1(1, 1), none)),
    ('a far gap too many', SPARSELY, (u1(3), u4(256), u1(1), none)),
    ('a difference too few', SPARSELY, (u1(1, 1), none, u1(1), none)),
    ('a large difference too few', SPARSELY, (u1(1, 1), none, u1(255, 1), none)),
    ('a large difference too many', SPARSELY, (u1(1, 1), none, u1(1, 1), u2(900))),
    ('more than a third', SPARSELY, (np.zeros(334, 'u1'), none, np.ones(334, 'u1'), none)),
    ('no change', SPARSELY, (none, none, none, none)),
    ('a stream too few', SPARSELY, (u1(1), none, u1(1))),
    ('a stream too many', SPARSELY, (u1(1), none, u1(1), none, none)),
    ('too short', DENSELY, (np.zeros(1999, 'u1'),)),
    ('too long', DENSELY, (np.zeros(2001, 'u1'),)),
    ('a bomb', DENSELY, (np.zeros(50_000_000, 'u1'),)),
    ('two', DENSELY, (np.zeros(2000, 'u1'), none)),
])
def test_streams_that_cannot_be(why, mode, streams):
    tracemalloc.start()
    block = delta._seal(mode, 2, 0, 2000, pack(*streams))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    refused(block)
    assert tracemalloc.get_traced_memory()[1] - before < 100_000
    tracemalloc.stop()


def test_frames_that_do_not_say_or_lie_how_long_they_are():
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(2000))
    frame = bytearray(level1.compress(bytes(range(256))*8))[:100]
    for bad in (silent, frame, level1.compress(bytes(2000)) + b'x', b''):
        refused(delta._seal(DENSELY, 2, 0, 2000, struct.pack('<I', len(bad)) + bad))
    refused(delta._seal(DENSELY, 2, 0, 2000, struct.pack('<I', 2**32 - 1) + level1.compress(bytes(2000))))


def test_a_block_has_its_place():
    block, = BLOCKS['sparse']
    assert 'was to come next' in refused(block, at=64)
    assert 'of an image of 1024' in refused(block, Layout.of(dict(w=('bfloat16', (500,)))))
    with pytest.raises(IntegrityError, match='its layout'): apply(block, OLD, bytearray(LAYOUT.nbytes - 1), LAYOUT)
    with pytest.raises(IntegrityError, match='its layout'): apply(block, OLD[:-1], bytearray(LAYOUT.nbytes), LAYOUT)
    with pytest.raises(IntegrityError, match='its layout'): encode(OLD, OLD[:-1], LAYOUT) # at once, not with the first block


@pytest.mark.parametrize('width', [1, 2, 4, 8])
@pytest.mark.parametrize('mode', [SPARSELY, DENSELY])
def test_memory_beside_the_images_is_bounded(mode, width):
    "The worst that a block of the largest size can ask for, and what encoding needs"
    layout, rng = Layout.of({'w': ('int8', (3*BLOCK,))}), np.random.default_rng(4)
    old, out, n = np.zeros(layout.nbytes, 'u1'), np.zeros(layout.nbytes, 'u1'), BLOCK//width
    if mode == DENSELY: payload = pack(rng.integers(0, 8, BLOCK, 'u1'))
    else:
        k = int(n * delta.SPARSE)
        payload = pack(np.full(k, 255, 'u1'), np.full(k, 2, '<u4'), np.full(k, 255, 'u1'), np.resize(np.arange(1, 100, dtype='u1'), k*width))
    block = delta._seal(mode, width, BLOCK, BLOCK, payload)
    tracemalloc.start()
    assert apply(block, old, out, layout) == 2*BLOCK and out[BLOCK:2*BLOCK].any()
    assert tracemalloc.get_traced_memory()[1] <= delta.WORKSPACE
    out[2*BLOCK:] = rng.integers(0, 256, BLOCK, 'u1') # raw
    tracemalloc.reset_peak()
    for made in encode(old, out, layout): assert len(made) <= HEADER + BLOCK
    assert tracemalloc.get_traced_memory()[1] <= delta.WORKSPACE
    tracemalloc.stop()
    assert (applied(encode(old, out, layout), old, layout) == out).all()


@pytest.mark.parametrize('rate', [0, .001, .03, .2, .9])
def test_an_estimate_is_near(rate):
    "Also where one tensor changes and another does not"
    rng, layout = np.random.default_rng(5), Layout.of(dict(a=('bfloat16', (6_000_000,)), b=('bfloat16', (2_000_000,)), c=('float32', (500_000,))))
    old = rng.integers(0, 256, layout.nbytes, 'u1')
    new = old.copy()
    x = new[:layout['a'].end].view('<u2')
    hit = np.flatnonzero(rng.random(x.size) < rate)
    x[hit] += rng.choice(np.array([1, 65535], '<u2'), hit.size)
    truth = sum(map(len, encode(old, new, layout))) / layout.nbytes
    assert abs(estimate(old, new, layout) - truth) <= .25*truth + 1e-4


@given(st.integers(0, 10**11), st.floats(0, 1.01), st.integers(0, 64))
def test_arrival(nbytes, ratio, hops):
    rates = Rates(4e8, 1e8, 1e9)
    full, less = arrival(nbytes, ratio, hops, rates)
    assert full >= 0 and less >= nbytes/4e8 # nothing arrives before it is encoded
    if hops: assert full >= nbytes/1e8 * .999 and arrival(nbytes, ratio, hops + 1, rates) >= (full, less)
    slower = arrival(nbytes, ratio, hops, Rates(4e8, 1e7, 1e9))
    assert slower[0] >= full and slower[1] >= less


@given(st.lists(st.tuples(st.sampled_from(['encode', 'wire', 'apply']), st.integers(0, 2**40), st.floats(1e-6, 1e6))))
def test_rates_stay_rates(seen):
    rates = Rates()
    for what, nbytes, seconds in seen: rates = rates.seen(what, nbytes, seconds)
    assert all(0 < r < float('inf') for r in msgspec.structs.astuple(rates))
    for bad in ('decode', 1, 1.), ('wire', -1, 1.), ('wire', 1, 0.):
        with pytest.raises(ConfigError): rates.seen(*bad)
