"The roofline grows with what it is given; a decoder that leaps from event to event does what one that counts every step does"
import math
from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from laminar_sdk.core.errors import ConfigError
from laminar_sdk.scheduling.decode import Decoder, Seat
from laminar_sdk.scheduling.roofline import GPUS, SHAPES, Constant, Roofline, chain_s, knee, knee_of, kv_knee_of, train_s


def fitting():
    "Every model on every GPU, with the fewest GPUs that hold it"
    for m in SHAPES:
        for g in GPUS:
            for tp in (1, 2, 4, 8):
                try: yield Roofline(m, g, tp); break
                except ConfigError: continue
ALL = list(fitting())
any_roofline = st.sampled_from(ALL)
batches, caches = st.integers(1, 1024), st.integers(0, 4_000_000)


def test_every_model_fits_somewhere(): assert len(ALL) >= 33 and {r.model.name for r in ALL} == set(SHAPES)

@given(any_roofline, batches, batches, caches, caches)
def test_a_step_never_gets_shorter(r, n, more, kv, fuller):
    assert 0 < r.step_s(n, kv) <= r.step_s(n + more, kv) <= r.step_s(n + more, kv + fuller)
    assert r.step_s(n, kv) >= r.overhead_s + r.model.nbytes / (r.tp * r.gpu.hbm_gbs * 1e9)

@given(any_roofline, batches, caches)
def test_more_gpus_are_faster_but_not_more_than_so_many_times(r, n, kv):
    twice = Roofline(r.model, r.gpu, 2 * r.tp)
    assert r.step_s(n, kv) / 2 <= twice.step_s(n, kv) <= r.step_s(n, kv) and twice.kv_tokens > 2 * r.kv_tokens and twice.pull_s() < r.pull_s()

@given(any_roofline, batches, caches, st.integers(1, 400))
def test_the_sum_of_steps_has_a_closed_form(r, n, kv, k):
    each = [r.step_s(n, kv + i * n) for i in range(k)]
    assert math.isclose(r.decode_s(n, kv, k), sum(each), rel_tol=1e-9)
    assert r.steps_in(n, kv, r.decode_s(n, kv, k)) == k and r.steps_in(n, kv, r.decode_s(n, kv, k) - each[-1] / 2) == k - 1

@given(any_roofline, st.integers(0, 100_000), st.integers(0, 100_000))
def test_prompts(r, n, seen):
    assert 0 <= r.prefill_s(n) <= r.prefill_s(n, seen) <= r.prefill_s(n + 1, seen)
    assert math.isclose(r.prefill_s(n + seen), r.prefill_s(seen) + r.prefill_s(n, seen), rel_tol=1e-6, abs_tol=1e-12) # read in two parts, it costs the same

@given(any_roofline, st.floats(0, 50_000), st.integers(1, 2048))
def test_the_knee_is_where_the_lines_cross(r, context, most):
    b = knee(r, context, most)
    assert 1 <= b <= most and b * context <= max(r.kv_tokens, context)
    memory, compute = (line[0] for line in r.lines(b, b * context))
    if b > 1: assert compute <= memory * 1.000001
    if b + 1 <= most and (b + 1) * context < r.kv_tokens:
        memory, compute = (line[0] for line in r.lines(b + 1, (b + 1) * context))
        assert compute >= memory * .999999

@given(st.floats(1e-4, .1), st.floats(1e-6, .01), st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True))
def test_the_knee_of_measurements(a, b, sizes):
    found = knee_of([(n, a + b * n) for n in sizes])
    assert min(sizes) <= found <= max(sizes) and abs(found - min(max(a / b, min(sizes)), max(sizes))) <= 1

@given(st.floats(1e-4, .1), st.floats(0, .01), st.floats(1e-9, 1e-4), st.integers(1, 256), st.integers(16, 4096), st.integers(10_000, 10**6))
def test_the_knee_of_a_measured_cache(a, b, c, n, context, room):
    "A step of n trajectories lasts a + b·n + c·(tokens in the cache): at C_max the cache costs what a step costs without it"
    alone, (little, much) = a + b, (((n * x), a + b * n + c * n * x) for x in (8, 8 + context))
    found = kv_knee_of(alone, little, much, room)
    assert 0 < found <= 1 and math.isclose(found, min(1, alone / c / room), rel_tol=1e-3)
    assert kv_knee_of(alone, little, much, 2 * room) <= found <= kv_knee_of(2 * alone, little, much, room)

@given(any_roofline, st.integers(1, 512), st.integers(1, 10**8))
def test_training_and_the_way_between(r, gpus, tokens):
    assert train_s(r.model, r.gpu, gpus, tokens) > train_s(r.model, r.gpu, gpus + 1, tokens)
    one = chain_s(r.model.nbytes, 1)
    assert one <= chain_s(r.model.nbytes, gpus) <= one + gpus * 2**20 / 25e9


class Counting:
    "The same engine, one step after the other: slow, and so simple that it is right"
    def __init__(self, seats, room): self.seats, self.room, self.running, self.waiting, self.step, self.ended = seats, room, [], deque(), 0, []
    def blocks(self, more=0): return sum(math.ceil((s['tokens'] + more) / 16) for s in self.running)
    def sit(self):
        while self.waiting and len(self.running) < self.seats and self.blocks(1) + math.ceil((self.waiting[0]['tokens'] + 1) / 16) <= self.room:
            self.running.append(self.waiting.popleft())
    def go(self, steps):
        for _ in range(steps):
            self.sit()
            while self.blocks(1) > self.room: self.waiting.appendleft(self.running.pop())
            for s in self.running: s['tokens'] += 1; s['left'] -= 1
            self.step += bool(self.running)
            self.ended += [(s['id'], self.step) for s in self.running if not s['left']]
            self.running = [s for s in self.running if s['left']]
        self.sit()

@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90), st.integers(1, 120)), min_size=1, max_size=25), st.integers(1, 8), st.data())
def test_it_leaps_as_others_count(requests, seats, data):
    "Arrivals and aborts at any time; 1 s a step, so that the clock counts steps"
    one, other = Decoder(Constant(1.), seats, 16 * 16), Counting(seats, 16)
    ended, t = [], 0
    for id, (wait, prompt, left) in enumerate(requests):
        t += wait
        ended += [(s.id, one.clock) for _, s in one.advance(float(t))]
        assert one.check() == []
        other.go(t - other_time(other))
        other.time = t
        one.add(Seat(id, prompt, left))
        other.waiting.append(dict(id=id, tokens=prompt, left=left))
        if data.draw(st.integers(0, 9)) == 0 and one.running:
            gone = data.draw(st.sampled_from(sorted(one.running)))
            one.drop(gone)
            other.running = [s for s in other.running if s['id'] != gone]
    ended += [(s.id, 0) for _, s in one.advance(t + 10_000.)]
    other.go(10_000)
    assert [i for i, _ in ended] == [i for i, _ in other.ended] and one.step == other.step
    assert one.check() == [] and not one.running and not one.waiting and one.used == 0 and one.kv == 0

def other_time(o): return getattr(o, 'time', 0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), min_size=1, max_size=30), st.lists(st.integers(1, 300), min_size=4, max_size=4), st.integers(1, 12), st.booleans())
def test_groups_share_and_everything_ends(members, prompts, seats, share):
    requests = [(prompts[group], left, group) for group, left in members]
    r = Roofline('0.5B', 'A100')
    d = Decoder(r, seats, 1024, share=share)
    for id, (prompt, left, group) in enumerate(requests): d.add(Seat(id, prompt, left, group, prompt))
    ended, t, n = [], 0., 0
    while d.running or d.waiting:
        t = d.next_s()
        assert t < math.inf and (n := n + 1) < 10_000
        ended += d.advance(t)
        assert d.check() == [] and d.used <= 1
    assert sorted(s.id for _, s in ended) == list(range(len(requests))) and all(s.made == requests[s.id][1] for _, s in ended)
    assert d.made == sum(left for _, left, _ in requests) and [t for t, _ in ended] == sorted(t for t, _ in ended)
    assert d.prefilled <= sum(p for p, *_ in requests) and d.blocks.n == 0 and not d.prefixes
    if not share: assert d.prefilled == sum(p for p, *_ in requests)


def test_standing_still():
    d = Decoder(Constant(.01), 4, 4096)
    for i in range(3): d.add(Seat(i, 50, 100))
    d.advance(.5)
    d.suspend()
    assert d.used == 0 and d.next_s() == math.inf and d.advance(5.) == [] and len(d.waiting) == 3
    d.release(5.)
    assert [round(t, 6) for t, _ in d.advance(6.)] == [5.5] * 3 and d.reprefilled == 3 * 100 and d.made == 300
    d.hold()
    d.add(Seat(9, 1, 1))
    assert d.advance(9.) == [] and d.waiting
    with pytest.raises(ConfigError, match='do not fit'): d.add(Seat(10, 4000, 100))
