"The partial response pool: every token once, under the newest lease, whatever is repeated, late or moved"
import numpy as np
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from laminar_sdk.data.partial import PartialPool


def piece(tokens): return np.array(tokens, np.int32), np.array(tokens, np.float32) / 7

class Pool(RuleBasedStateMachine):
    "Two leases' worth of rollouts write; messages are repeated and overlap; the model is a plain list"
    def __init__(self):
        super().__init__()
        self.pool, self.lease, self.tokens, self.sent, self.next = PartialPool(), 1, [], [], 0

    def new(self, n):
        self.next += n
        return list(range(self.next - n, self.next))

    def send(self, lease, first, tokens, version): return self.pool.extend(5, lease, first, *piece(tokens), version)

    @rule(n=st.integers(1, 4), overlap=st.integers(0, 3))
    def grow(self, n, overlap):
        first = max(len(self.tokens) - overlap, 0)
        fresh = self.new(n)
        message = (self.lease, first, self.tokens[first:] + fresh, self.lease)
        assert self.send(*message) == n
        self.tokens += fresh
        self.sent.append(message)

    @rule(data=st.data())
    def repeat(self, data):
        if not self.sent: return
        message = data.draw(st.sampled_from(self.sent))
        assert self.send(*message) == 0

    @rule(keep=st.integers(0, 10), n=st.integers(1, 3))
    def move(self, keep, n):
        "Another rollout goes on from a prefix"
        self.lease += 1
        keep = min(keep, len(self.tokens))
        fresh = self.new(n)
        assert self.send(self.lease, keep, fresh, self.lease) == n
        self.tokens = self.tokens[:keep] + fresh
        self.sent = [m for m in self.sent if m[0] == self.lease] + [(self.lease, keep, fresh, self.lease)]

    @rule(data=st.data(), lease=st.integers(0, 3))
    def late(self, data, lease):
        "One that lost its lease is still talking"
        if not self.tokens or lease >= self.lease: return
        first = data.draw(st.integers(0, len(self.tokens)))
        assert self.send(lease, first, [10**6], 1) is None

    @rule()
    def gap(self):
        before = self.pool.peek(5)
        assert self.send(self.lease, len(self.tokens) + 1, [1], 1) is None
        after = self.pool.peek(5)
        assert (before is None) == (after is None)

    @rule()
    def forget(self):
        self.pool.forget([5, 6])
        self.tokens, self.sent, self.lease = [], [], self.lease + 1
        assert 5 not in self.pool

    @invariant()
    def holds_the_tokens(self):
        r = self.pool.peek(5)
        if r is None:
            assert self.tokens == []
            return
        assert r.ids.tolist() == self.tokens and r.logprobs.tolist() == piece(self.tokens)[1].tolist()
        assert [f for f, _ in r.versions] == sorted({f for f, _ in r.versions}) and (not self.tokens or r.versions[0][0] == 0)
        assert len({v for _, v in r.versions}) == len(r.versions) # spans of one version are one entry
        assert self.pool.stats.tokens == len(self.tokens)

TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=25)


def test_many_trajectories_do_not_meet():
    pool = PartialPool()
    for t in range(3):
        for i in range(300): pool.extend(i, 1, t, *piece([i * 10 + t]), 1)
    assert len(pool) == 300 and all(pool.pop(i).ids.tolist() == [i * 10, i * 10 + 1, i * 10 + 2] for i in range(300))
    assert len(pool) == 0 and pool.stats.nbytes == 0 and pool.stats.received_bytes == 8 * 900


def test_what_is_popped_is_the_callers():
    "A view into the pool would change under its reader"
    pool = PartialPool()
    pool.extend(1, 1, 0, *piece([1, 2]), 1)
    r = pool.peek(1)
    pool.extend(1, 1, 2, *piece([3]), 1)
    assert r.ids.tolist() == [1, 2]
    r.ids[0] = 9
    assert pool.pop(1).ids.tolist() == [1, 2, 3]
