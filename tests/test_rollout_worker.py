"""The rollout worker on the emulated engine: nothing lost, nothing twice, no version mixed, whatever fails."""
import asyncio, random, secrets, tempfile, time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from laminar_sdk.core.config import Sampling
from laminar_sdk.core.events import PullFailed, Refused, WaveStarted
from laminar_sdk.core.types import Trajectory
from laminar_sdk.rollout.emulated import EmulatedEngine, random_answer
from laminar_sdk.rollout.engine import Engine, EngineDead, GenerationRequest, LoadReport
from laminar_sdk.rollout.reports import Assignment, decode_report, encode_report
from laminar_sdk.rollout.worker import RolloutWorker, report_interval


class Held(EmulatedEngine):
    "Versions without a relay"
    loads = ()
    async def load(self, version, socket_path, keep=False):
        if self.dead: raise EngineDead(*self.dead)
        assert keep or not self.running and not self.waiting, 'a load in the middle of a wave'
        await asyncio.sleep(.005)
        self.loads = *self.loads, version
        return LoadReport(version, .005, True, 0, emulated=True)


class Receiver:
    "Keeps what arrives as trajectories do: a hole raises. Behaves as `how(report)` says, before and after taking it"
    def __init__(self, how=None): self.how, self.seen, self.events, self.reports, self.held = how, {}, [], [], {}
    async def __call__(self, report):
        r = decode_report(encode_report(report))
        if self.how and await self.how(r, 'before'): raise ConnectionError('away')
        self.events += [e for e in r.events if e not in self.events]
        self.reports.append((time.monotonic(), r))
        for p in r.pieces:
            t = self.seen.setdefault((p.trajectory, p.lease), Trajectory(p.trajectory, 0, 0, 0, lease=p.lease))
            if not len(t) and p.first: t.extend(0, np.zeros(p.first, np.int32), np.zeros(p.first, np.float32), -1) # begun elsewhere
            t.extend(p.first, np.frombuffer(p.ids, np.int32), np.frombuffer(p.logprobs, np.float32), r.version)
            assert t.finish_reason in (None, p.finish), 'tokens after the end'
            t.finish_reason = p.finish
        if self.how and await self.how(r, 'after'): raise ConnectionError('away')

    def ended(self): return {k for k, t in self.seen.items() if t.finish_reason}


def item(t, lease=1, n=50, prompt=(4, 5), **kw): return Assignment(t, lease, np.array(prompt, np.int32), Sampling(max_tokens=n), **kw)
def forever(n=900): return lambda prompt, rng: np.full(n, 7)

async def until(condition, timeout_s=40):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, 'it did not happen in time'
        await asyncio.sleep(.002)

@asynccontextmanager
async def working(receiver, engine=None, **kw):
    worker = RolloutWorker(0, engine or Held(step_s=.001), receiver, **dict(interval_s=.005) | kw)
    await worker.start()
    try: yield worker
    finally: await worker.stop(grace_s=.5)

def go(coroutine): return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_it_is_an_engine(): assert isinstance(EmulatedEngine(), Engine)


@pytest.mark.parametrize('seed', range(4))
def test_nothing_is_lost_or_twice_whatever_the_receiver_does(seed):
    "A receiver that fails before or after taking a report, or is slow, at random: three waves, three versions"
    rng = random.Random(seed)
    async def how(report, when):
        if rng.random() < .2: await asyncio.sleep(rng.random() * .03)
        return rng.random() < .35
    async def run():
        receiver = Receiver(how)
        async with working(receiver, Held(step_s=.0005, max_num_seqs=8)) as w:
            for n in range(3):
                await w.wave(n, 10 + n, '', [item(20 * n + i) for i in range(20)])
                await until(lambda: len(receiver.ended()) == 20 * (n + 1), 30)
            assert w.failed_sends > 0 and w.engine.loads == (10, 11, 12)
        assert [(e.wave, e.version) for e in receiver.events] == [(0, 10), (1, 11), (2, 12)]
        for (t, _), r in receiver.seen.items():
            assert r.versions == [(0, 10 + t // 20)] and (r.finish_reason == 'stop') == (r.response_ids[-1] == 1) and len(r.logprobs) == len(r)
    go(run())


def test_the_same_tokens_whatever_happened_on_the_way():
    "What arrives is what the engine makes for that seed, to the bit"
    async def answers(how, order):
        receiver = Receiver(how)
        async with working(receiver, Held(step_s=.0005, max_num_seqs=4, seed=3)) as w:
            await w.wave(1, 1, '', [item(t) for t in order])
            await until(lambda: len(receiver.ended()) == 12)
        return {t: (r.response_ids.tolist(), r.logprobs.tolist(), r.finish_reason) for (t, _), r in receiver.seen.items()}
    count = iter(range(10_000))
    async def how(report, when): return next(count) % 3 == 0
    calm, rough = go(answers(None, range(12))), go(answers(how, reversed(range(12))))
    assert calm == rough and len({tuple(a[0]) for a in calm.values()}) > 6


def test_a_report_never_mixes_versions():
    "Tokens of two versions gather while the receiver is away: each goes under its own version"
    away = [True]
    async def how(report, when): return away[0]
    async def run():
        receiver = Receiver(how)
        async with working(receiver, Held(step_s=0)) as w:
            for n in range(4): await w.wave(n, n, '', [item(10 * n + i) for i in range(5)])
            await until(lambda: not w.orders and not w.flying and w.version == 3)
            away[0] = False
            await until(lambda: len(receiver.ended()) == 20)
        for _, r in receiver.reports: assert {p.trajectory // 10 for p in r.pieces} <= {r.version}
        assert [r.version for _, r in receiver.reports if r.pieces] == [0, 1, 2, 3] # merged: one report a version
    go(run())


def test_the_number_of_reports_follows_time_not_tokens():
    async def run():
        receiver, began = Receiver(), time.monotonic()
        async with working(receiver, Held(step_s=.01, max_num_seqs=64, answer=forever(60)), interval_s=.05) as w:
            await w.wave(1, 1, '', [item(t, n=60) for t in range(64)])
            await until(lambda: len(receiver.ended()) == 64)
        assert len(receiver.reports) <= (time.monotonic() - began) / .05 + 3
        assert sum(len(p.ids) for _, r in receiver.reports for p in r.pieces) == 64 * 60 * 4
        assert max(r.tokens_per_s for _, r in receiver.reports) > 500 and max(r.running for _, r in receiver.reports) == 64
        assert 0 < max(r.kv_used for _, r in receiver.reports) <= 1 and all(r.emulated for _, r in receiver.reports)
    go(run())
    assert report_interval(1000) == 5


def test_an_order_may_come_twice_and_a_new_lease_starts_anew():
    async def run():
        receiver, engine = Receiver(), Held(step_s=.001)
        asked = []
        theirs = engine.generate
        def generate(request): asked.append(request.id); return theirs(request)
        engine.generate = generate
        async with working(receiver, engine) as w:
            for _ in range(3): await w.wave(1, 1, '', [item(1), item(2)])
            await until(lambda: len(receiver.ended()) == 2)
            await w.wave(1, 1, '', [item(1), item(2)])
            await w.wave(2, 1, '', [item(1, lease=2)])
            await until(lambda: (1, 2) in receiver.ended())
        assert asked == ['1.1', '2.1', '1.2'] and engine.loads == (1,)
        assert receiver.seen[1, 1].response_ids.tolist() == receiver.seen[1, 2].response_ids.tolist() # the same seed
    go(run())


def test_what_is_remembered_of_old_orders_is_bounded():
    w = RolloutWorker(0, Held(), Receiver())
    for n in range(40): w._new([item(n * 1000 + i) for i in range(1000)])
    assert len(w.known) == 16_384 and not w._new([item(39_999)])


def test_abort():
    "In flight, ordered but not begun, and everything; each ends once, with `abort`, and keeps its tokens"
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=.001, answer=forever())) as w:
            await w.wave(1, 1, '', [item(t, n=900) for t in range(4)])
            await until(lambda: len(receiver.seen) == 4)
            await w.more(1, 1, [item(t, n=900) for t in range(4, 8)]) # ordered, not begun
            await w.abort([0, 1, 5, 99])
            await until(lambda: len(receiver.ended()) == 3)
            assert all(len(receiver.seen[t, 1]) > 0 for t in (0, 1)) and len(receiver.seen[5, 1]) == 0
            assert {k[0] for k in receiver.ended()} == {0, 1, 5}
            await until(lambda: len(w.flying) == 5)
            await w.abort()
            await until(lambda: len(receiver.ended()) == 8)
            await w.wave(2, 2, '', [item(8)])
            await w.abort()
            await w.wave(3, 3, '', [item(9, n=5)])
            await until(lambda: (9, 1) in receiver.ended())
        assert {receiver.seen[t, 1].finish_reason for t in range(9)} == {'abort'} and receiver.seen[9, 1].finish_reason == 'length'
        assert [e.wave for e in receiver.events] == [1, 3] # the second wave was empty when its turn came
    go(run())


def test_a_new_wave_cuts_what_is_left_and_more_joins_only_its_own_version():
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=.001, answer=forever())) as w:
            await w.wave(1, 1, '', [item(t, n=900) for t in range(3)])
            await until(lambda: len(receiver.seen) == 3)
            await w.wave(1, 1, '', [item(t, n=900) for t in range(3)]) # once more
            await asyncio.sleep(.05)
            assert len(w.flying) == 3 and not receiver.ended()
            await w.wave(2, 2, '', [item(5, n=900)])
            await until(lambda: len(receiver.ended()) == 3 and w.version == 2)
            await w.more(1, 1, [item(6, n=9)]) # of a wave that is over
            await until(lambda: (6, 1) in receiver.ended())
            await w.more(2, 2, [item(7, n=9)])
            await until(lambda: (7, 1) in receiver.ended())
        assert receiver.seen[6, 1].finish_reason == 'abort' and len(receiver.seen[6, 1]) == 0 and len(receiver.seen[7, 1]) == 9
        assert [e.wave for e in receiver.events] == [1, 2]
    go(run())


def test_another_version_between_two_tokens():
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=.004, answer=forever())) as w:
            await w.wave(1, 1, '', [item(1, n=200)])
            await until(lambda: (1, 1) in receiver.seen and len(receiver.seen[1, 1]) > 5)
            await w.switch(1, 2, '')
            await until(lambda: (1, 1) in receiver.ended())
        t = receiver.seen[1, 1]
        assert len(t) == 200 and [v for _, v in t.versions] == [1, 2] and 5 < t.versions[1][0] < 200
        assert [type(e).__name__ for e in receiver.events] == ['WaveStarted', 'Switched']
    go(run())


def test_tokens_that_an_engine_kept_back_are_of_the_version_that_made_them(monkeypatch):
    "It shows what it has made five times a second only; weights change in between"
    import laminar_sdk.rollout.emulated as module
    monkeypatch.setattr(module, '_pull', lambda version, path: LoadReport(version, 0., True, 0, emulated=True))
    async def run():
        receiver, engine, made = Receiver(), EmulatedEngine(step_s=.003, show_s=.2, answer=forever()), []
        hold = engine.decoder.hold
        engine.decoder.hold = lambda: (made.append({id: engine.decoder.made_by(s) for id, s in engine.running.items()}), hold())
        async with working(receiver, engine) as w:
            await w.wave(1, 1, '', [item(t, n=600 + t) for t in range(1, 5)])
            await until(lambda: len(receiver.seen) == 4 and all(len(t) > 10 for t in receiver.seen.values()))
            await w.switch(1, 2, '')
            await until(lambda: len(receiver.ended()) == 4)
        switch = made[-1]
        assert len(switch) == 4 and all(t.versions == [(0, 1), (switch[f'{i}.1'], 2)] and len(t) == 600 + i for (i, _), t in receiver.seen.items())
    go(run())


def test_an_abort_that_comes_before_the_engine_knows_the_request():
    class Slow(Held):
        async def generate(self, request):
            await asyncio.sleep(.03) # as vLLM prepares a request
            async for c in super().generate(request): yield c
    async def run():
        receiver = Receiver()
        async with working(receiver, Slow(step_s=.001, answer=forever())) as w:
            await w.wave(1, 1, '', [item(1, n=900)])
            await until(lambda: w.flying)
            await w.abort([1])
            await until(receiver.ended)
        assert receiver.seen[1, 1].finish_reason == 'abort' and len(receiver.seen[1, 1]) < 20
    go(run())


def test_refused_and_failed_pulls_leave_the_others_alone():
    class Picky(Held):
        async def load(self, version, socket_path, keep=False):
            if version == 2: raise OSError('relay away')
            return await super().load(version, socket_path, keep)
    async def run():
        receiver = Receiver()
        async with working(receiver, Picky(step_s=0, max_model_len=32)) as w:
            await w.wave(1, 1, '', [item(1), item(2, prompt=[4] * 32), item(3, prompt=[]), item(4, prompt=[4] * 30, n=500), item(5, n=0 + 1, first=1)])
            await until(lambda: len(receiver.ended()) == 3)
            await w.wave(2, 2, '', [item(6)])
            await until(lambda: any(isinstance(e, PullFailed) for e in receiver.events))
            assert w.version == -1 and not w.orders
            await w.wave(3, 1, '', [item(7)])
            await until(lambda: (7, 1) in receiver.ended())
            assert w.engine.loads == (1, 1) # after a failed pull nothing is taken for granted
        assert {e.trajectory for e in receiver.events if isinstance(e, Refused)} == {2, 3}
        assert receiver.seen[5, 1].finish_reason == 'length' # it was complete; whoever had it before could not say so
        assert len(receiver.seen[4, 1]) <= 2 # what the model's length leaves
        assert [e.reason for e in receiver.events if isinstance(e, PullFailed)] == ['OSError: relay away']
    go(run())


def test_a_prompt_that_alone_exceeds_the_cache_is_refused_and_others_go_on():
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=.001, kv_tokens=64, answer=forever(9))) as w:
            await w.wave(1, 1, '', [item(1, prompt=np.full(80, 4, np.int32), n=9), item(2, n=9)])
            await until(lambda: (2, 1) in receiver.ended())
        assert [(e.trajectory, '80' in e.reason) for e in receiver.events if isinstance(e, Refused)] == [(1, True)] and len(receiver.seen[2, 1]) == 9
    go(run())


def test_tokens_before_a_move_count_against_the_budget():
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=0, answer=forever())) as w:
            await w.wave(1, 1, '', [item(1, lease=4, n=30, first=12, prompt=[4, 5] + [7] * 12)])
            await until(receiver.ended)
        t = receiver.seen[1, 4]
        assert len(t) == 30 and t.finish_reason == 'length' and t.versions == [(0, -1), (12, 1)]
    go(run())


def test_an_engine_that_dies():
    "Tokens first, the reason last, once; then no more waves and no more reports"
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=.001, answer=forever()), heartbeat_s=.02) as w:
            await w.wave(1, 1, '', [item(t, n=900) for t in range(8)])
            await until(lambda: len(receiver.seen) == 8)
            w.engine.crash()
            await until(lambda: receiver.reports[-1][1].engine_dead)
            n, made = len(receiver.reports), w.outbox.tokens
            with pytest.raises(EngineDead, match='killed'): await w.wave(2, 1, '', [item(20)])
            await asyncio.sleep(.1)
        assert len(receiver.reports) == n and [bool(r.engine_dead) for _, r in receiver.reports].count(True) == 1
        assert sum(len(t) for t in receiver.seen.values()) == made and not receiver.ended()
    go(run())


def test_an_error_that_nobody_foresaw_ends_the_rollout_and_says_why():
    class Broken(Held):
        async def generate(self, request):
            yield None
    async def run():
        receiver = Receiver()
        async with working(receiver, Broken()) as w:
            await w.wave(1, 1, '', [item(1)])
            await until(lambda: receiver.reports and receiver.reports[-1][1].engine_dead)
        return receiver.reports[-1][1].engine_dead
    assert 'AttributeError' in go(run())


def test_signs_of_life_and_a_receiver_that_hangs():
    hang = [True]
    async def how(report, when):
        if hang[0]: await asyncio.sleep(60)
    async def run():
        receiver = Receiver(how)
        async with working(receiver, heartbeat_s=.02, report_timeout_s=.05) as w:
            await until(lambda: w.failed_sends >= 2)
            hang[0] = False
            await until(lambda: len(receiver.reports) >= 4)
        assert [r.seq for _, r in receiver.reports] == list(range(1, len(receiver.reports) + 1)) and not receiver.seen
    go(run())


def test_stop_hands_over_what_there_is():
    async def run():
        receiver = Receiver()
        async with working(receiver, Held(step_s=.001, answer=forever()), interval_s=.2) as w:
            await w.wave(1, 1, '', [item(t, n=900) for t in range(8)])
            await until(lambda: w.outbox.tokens > 100)
        assert sum(len(t) for t in receiver.seen.values()) == w.outbox.tokens and len(receiver.ended()) == 8
    go(run())


def test_the_emulated_engine_pulls_from_a_real_relay():
    "The newest, a named one, one that is not there; the checksum in the report is the manifest's"
    torch = pytest.importorskip('torch')
    from laminar_sdk.weights.client import RelayClient
    from laminar_sdk.weights.relay import Relay
    async def run(home):
        with Relay('here', home/'s', listen=None, secret=secrets.token_bytes(), keep=2) as relay, RelayClient(home/'s', publish_dtype='bfloat16') as client:
            for v in (0, 1, 2): client.publish(v, dict(w=torch.full((8, 8), float(v))))
            await asyncio.to_thread(client.wait_for, 2, 10)
            engine, receiver = EmulatedEngine(step_s=0), Receiver()
            loaded = await engine.load(None, str(home/'s'))
            assert (loaded.version, loaded.nbytes, loaded.emulated) == (2, 128, True) and loaded.checksum == client.versions()[-1].checksum
            async with working(receiver, engine) as w:
                await w.wave(1, 1, str(home/'s'), [item(1)])
                await w.wave(2, 0, str(home/'s'), [item(2)]) # no longer kept
                await w.wave(3, 2, str(home/'s'), [item(3)])
                await until(lambda: len(receiver.ended()) == 2)
            assert {k[0]: t.version for k, t in receiver.seen.items()} == {1: 1, 3: 2}
            assert [type(e) for e in receiver.events] == [WaveStarted, PullFailed, WaveStarted] and 'version 0' in receiver.events[1].reason
            await until(lambda: relay.shelf.stats()['holders'] == 0) # a pull that is over holds nothing
    with tempfile.TemporaryDirectory(prefix='lmr-') as home: go(run(Path(home)))


def test_emulated_engine_seats_and_cache():
    async def run():
        engine = EmulatedEngine(step_s=.015, max_num_seqs=4, kv_tokens=100, answer=forever(20))
        await engine.start()
        async def one(i): return [c async for c in engine.generate(GenerationRequest(i, np.full(10, 4, np.int32), 20))]
        tasks = [asyncio.create_task(one(i)) for i in range(10)]
        await until(lambda: engine.stats().kv_used > .4)
        s = engine.stats()
        assert (s.running, s.waiting, s.kv_tokens) == (4, 6, 100) and s.kv_used <= 1
        ends = [sum(len(c.ids) for c in t) for t in await asyncio.gather(*tasks)]
        assert ends == [20] * 10 and engine.stats().kv_used == 0
        await engine.stop()
    go(run())
    assert np.median([len(random_answer()(None, np.random.default_rng(i))) for i in range(300)]) < 30
