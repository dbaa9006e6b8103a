"The rules of the shelf, under any order of arrivals, readers, pins and losses"
import msgspec, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from laminar_sdk.core.errors import ConfigError, IntegrityError, MissingError
from laminar_sdk.weights.layout import Layout, Manifest, checksum, verify
from laminar_sdk.weights.store import VersionStore

LAYOUT = Layout.of(dict(w=('uint8', (8,))))
def manifest(version): return Manifest(version, LAYOUT, checksum(bytes(64), LAYOUT))

class Shelves(RuleBasedStateMachine):
    """`free` is what the store gave up. Nothing that somebody holds, that is pinned, or that is among the newest `keep` may be in it,
    nothing may be in it twice, and nothing that could be there may be missing."""
    def __init__(self):
        super().__init__()
        self.keep, self.store = 2, VersionStore(2)
        self.arriving, self.held, self.free, self.shown = [], [], [], []

    @rule(step=st.integers(-2, 3))
    def arrive(self, step):
        version = self.store.newest + step
        if step <= 0 or version < 0:
            with pytest.raises(ConfigError): self.store.check(version)
        else: self.arriving.append(self.store.admit(manifest(version)))

    @precondition(lambda self: self.arriving)
    @rule(i=st.integers(0, 9), well=st.booleans())
    def end_of_arrival(self, i, well):
        image = self.arriving.pop(i % len(self.arriving))
        if well and image.version > self.store.newest:
            self.store.show(image)
            self.shown.append(image.version)
        elif well:
            with pytest.raises(ConfigError): self.store.show(image)
        self.store.drop(image)

    @rule(version=st.none() | st.integers(0, 9))
    def open(self, version):
        try: image = self.store.find(version)
        except MissingError: return
        assert image.visible and image not in self.free
        self.store.hold(image)
        self.held.append(image)

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 9))
    def let_go(self, i): self.store.drop(self.held.pop(i % len(self.held)))

    @rule(version=st.integers(0, 9))
    def pin(self, version):
        try: self.store.pin(version)
        except MissingError: assert version not in self.store.visible()

    @rule(version=st.integers(0, 9))
    def unpin(self, version): self.store.unpin(version)

    @rule()
    def collect(self):
        self.free += self.store.collect()
        kept = {*sorted(self.store.visible())[-self.keep:], *self.store.pins}
        assert all(i in self.held or i in self.arriving or i.version in kept for i in self.store.images) # nothing stays for no reason

    @invariant()
    def nothing_in_use_is_free(self):
        assert len(set(map(id, self.free))) == len(self.free)
        in_use = {id(i) for i in (*self.held, *self.arriving)} | {id(i) for v, i in self.store.visible().items()}
        assert not in_use & {id(i) for i in self.free}

    @invariant()
    def versions_only_go_up(self): assert self.shown == sorted(set(self.shown)) and self.store.newest == (self.shown or [-1])[-1]

    @invariant()
    def the_newest_can_be_read(self): assert self.store.newest < 0 or self.store.find().version == self.store.newest

TestShelves = Shelves.TestCase
TestShelves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

shapes = st.lists(st.tuples(st.sampled_from(['float32', 'bfloat16', 'int64', 'uint8', 'bool']), st.lists(st.integers(0, 5), max_size=3).map(tuple)), max_size=8)

@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([1, 8, 64, 4096]), st.data())
def test_any_layout_survives_the_wire_and_any_flipped_bit_is_found(shapes, align, data):
    layout = Layout.of({f't{i}': s for i, s in enumerate(shapes)}, align=align)
    image = bytearray(data.draw(st.binary(min_size=layout.nbytes, max_size=layout.nbytes)))
    m = Manifest(3, layout, checksum(image, layout))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(m), type=Manifest) == m
    verify(image, m)
    full = [t for t in layout.tensors if t.nbytes]
    if not full: return
    t = data.draw(st.sampled_from(full))
    image[data.draw(st.integers(t.offset, t.end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(IntegrityError, match=repr(t.name)): verify(image, m)
