"Workers, reports, the pool of partial responses and environment processes together: conversations that are aborted, moved and orphaned at random"
import asyncio, collections, os, random, signal, time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import laminar_sdk
from laminar_sdk.core.config import Sampling
from laminar_sdk.core.events import Refused
from laminar_sdk.data.partial import PartialPool
from laminar_sdk.rollout.arithmetic import problems, worked
from laminar_sdk.rollout.calculator import Calculator
from laminar_sdk.rollout.emulated import EmulatedEngine
from laminar_sdk.rollout.engine import LoadReport
from laminar_sdk.rollout.environment import describe, masked, turn_spans
from laminar_sdk.rollout.environment_pool import EnvironmentPool, pack_environment
from laminar_sdk.rollout.reports import Assignment, decode_report, encode_report
from laminar_sdk.rollout.stops import Codec, Reader
from laminar_sdk.rollout.worker import RolloutWorker

codec, N = Codec(Tokenizer.from_file(str(Path(laminar_sdk.__file__).parent/'assets/demo_model/tokenizer.json'))), 40


class Slow(Calculator):
    "A calculator that takes its time"
    deterministic = True
    async def step(self, text, ids):
        await asyncio.sleep(.003)
        return super().step(text, ids)

class Held(EmulatedEngine):
    "An emulated engine whose versions need no relay"
    async def load(self, version, socket_path, keep=False):
        for id in list(self.flows): await self.abort(id)
        return LoadReport(version, 0., True, 1, emulated=True)

def teacher(ids, rng): return [*codec.encode(worked(codec.text(ids))), 1]


class World:
    "Rollouts, and what a coordinator and a data actor would keep of them"
    def __init__(self, seed):
        self.rng, self.rows = random.Random(seed), [r for r in problems(200, seed=seed) if r['prompt'].count('+') > 2][:N]
        self.spec, self.sessions = describe(Slow()), EnvironmentPool(pack_environment(Slow()), workers=2)
        self.pool, self.finish, self.lease, self.where, self.failed, self.aborted = PartialPool(), {}, {}, {}, {}, set()
        self.workers, self.dead, self.waves, self.stats = {}, set(), 0, collections.Counter()

    async def report(self, r):
        if self.rng.random() < .1: raise ConnectionError('lost')
        r = decode_report(encode_report(r))
        if r.rollout in self.dead: return
        self.failed.update({e.trajectory: e.reason for e in r.events if isinstance(e, Refused)})
        for p in r.pieces:
            self.pool.extend(p.trajectory, p.lease, p.first, np.frombuffer(p.ids, np.int32), np.frombuffer(p.logprobs, np.float32), r.version, p.calls)
            if p.lease != self.lease[p.trajectory]: continue
            if p.finish == 'abort': self.aborted.add(p.trajectory)
            elif p.finish: self.finish[p.trajectory] = p.finish
        if self.rng.random() < .05: raise ConnectionError('the acknowledgement is lost: it comes again')

    async def born(self):
        i = len(self.workers)
        self.workers[i] = RolloutWorker(i, Held(answer=teacher, step_s=.0005, max_num_seqs=16), self.report, interval_s=.005, seed=1,
                                        readers=dict(train=Reader(codec, self.spec.stops, [1])), spec=self.spec, sessions=lambda item: self.sessions)
        await self.workers[i].start()

    def item(self, t):
        held, prompt = self.pool.peek(t), codec.encode(self.rows[t]['prompt'])
        self.lease[t] = self.lease.get(t, 0) + 1
        ids = np.concatenate([prompt, held.ids]) if held else prompt
        return Assignment(t, self.lease[t], ids, Sampling(max_tokens=128), first=len(held.ids) if held else 0, calls=held.calls if held else [], prompt=t)

    async def place(self, ts, i):
        items, w = [self.item(t) for t in ts], self.workers[i]
        for t in ts: self.where[t] = i
        self.aborted -= set(ts)
        self.waves += 1
        await (w.wave(self.waves, 1, 's', items) if w.version != 1 else w.more(w.begun, 1, items))

    @property
    def left(self): return [t for t in range(N) if t not in self.finish and t not in self.failed]
    @property
    def alive(self): return [i for i in self.workers if i not in self.dead]

    async def move(self):
        "Some of one rollout's go to another, when it has said their last tokens"
        i = self.where[self.rng.choice(self.left)]
        ts, until = [t for t in self.left if self.where[t] == i][:5], time.monotonic() + 20
        await self.workers[i].abort(ts)
        while any(t not in self.aborted and t in self.left for t in ts):
            assert time.monotonic() < until, [(t, self.lease[t], self.workers[i], self.workers[i].loops) for t in ts]
            await asyncio.sleep(.002)
        await self.place([t for t in ts if t in self.aborted], self.rng.choice(self.alive))
        self.stats['moves'] += 1

    async def kill_rollout(self):
        i = self.rng.choice(self.alive)
        self.dead.add(i)
        for x in [*self.workers[i].tasks, *self.workers[i].flying.values()]: x.cancel()
        await self.born()
        await self.place([t for t in self.left if self.where[t] == i], self.alive[-1])
        self.stats['deaths'] += 1

    def kill_process(self):
        up = [p for p in self.sessions.processes if p.alive]
        if up: os.kill(self.rng.choice(up).pid, signal.SIGKILL)
        self.stats['kills'] += 1

    async def live(self):
        for _ in range(3): await self.born()
        for i in range(3): await self.place(range(i, N, 3), i)
        until, killed = time.monotonic() + 100, 0.
        while self.left:
            assert time.monotonic() < until, self.left
            await asyncio.sleep(.02)
            what = self.rng.random()
            if self.left and what < .5: await self.move()
            elif what < .6 and len(self.workers) < 8: await self.kill_rollout()
            elif what < .68 and time.monotonic() - killed > .2: # often enough that starts are hit, several in a row
                self.kill_process()
                killed = time.monotonic()
        for i in self.alive: await self.workers[i].stop()
        await self.sessions.stop()


@pytest.mark.parametrize('seed', [1, *(pytest.param(s, marks=pytest.mark.long(sample=False)) for s in range(2, 12))])
def test_conversations_survive_moves_and_deaths(seed):
    async def story():
        world = World(seed)
        await world.live()
        return world
    w = asyncio.run(story())
    said = w.failed, w.stats, list(w.sessions.lines)[-6:]
    assert set(w.finish.values()) == {'stop'} and len(w.finish) + len(w.failed) == len(w.rows) and w.stats['moves'] > 3, said
    assert set(w.failed.values()) <= {'env_lost'} and len(w.failed) <= w.stats['kills'] // 2, said # a call is tried twice: two kills may hit both
    for t, row in enumerate(w.rows):
        if t in w.failed: continue
        had = w.pool.peek(t)
        assert codec.text(had.ids) == worked(row['prompt']) + '<eos>', (row, had)
        assert len(turn_spans(len(had.ids), had.calls)) == row['prompt'].count('+') + 1
        assert all(codec.text(had.ids[c.first:c.last]).isdigit() for c in had.calls if c.last > c.first)
        mask = masked(len(had.ids), had.calls)
        assert (had.logprobs[mask == 0] == 0).all() and (had.logprobs[mask == 1] < 0).all()
