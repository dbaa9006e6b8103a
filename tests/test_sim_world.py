"The simulated world: the same trajectories under every schedule, nothing lost, and the same figures each time"
from dataclasses import replace

import numpy as np
import pytest

from laminar_sdk.scheduling.schedules import SCHEDULES
from laminar_sdk.sim.traces import GRID, constant, known, length_of, lognormal
from laminar_sdk.sim.world import Setup, World, interval

SMALL = Setup(gpus=8, rollouts=5, trajectories=64, group=8, lengths=lognormal(400, 1., most=8192), warmup=1, steps=6)


class Checked(World):
    "Looks at every invariant once a look, and keeps what the actor was given"
    def look(self):
        assert not (bad := self.manager.check() + [x for r in self.rollouts.values() for x in r.decoder.check()]), bad
        super().look()
    def do_GiveBatch(self, c):
        self.given = getattr(self, 'given', {}) | {t: (self.manager.ledger.rows[t].length, self.manager.ledger.rows[t].group) for g in c.trajectories for t in g}
        super().do_GiveBatch(c)


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('k', [None, 1, 4])
def test_each_schedule(schedule, k):
    s = replace(SMALL, schedule=schedule, max_staleness=k, every=1.)
    w = Checked(s).run()
    f = w.figures()
    assert len(w.given) >= 7 * 64 and all(n == length_of(s.lengths, 0, t, g) for t, (n, g) in w.given.items())
    assert 0 < f['train_tokens_per_s'] and 0 < f['kv_mean'] < 1 and 0 <= f['bubble_fraction'] < 1 and f['in_flight_mean'] <= 2 * 64
    assert k is None or f['staleness_max'] <= k
    assert f['staleness_max'] <= dict(sync=0, one_step=1, stream=1).get(schedule, 99)
    if schedule == 'laminar': assert f['moves'] and f['reprefill_tokens']
    if schedule == 'partial': assert f['reprefill_tokens'] and not f['moves']
    if schedule in ('sync', 'one_step', 'stream', 'inflight'): assert not f['moves'] + f['reprefill_tokens']


def test_again_it_is_the_same():
    one, other, third = (World(replace(SMALL, seed=seed)).run().figures() for seed in (0, 0, 1))
    assert one == other != third


def test_colocated_takes_turns():
    w = Checked(replace(SMALL, schedule='sync', rollouts=8, colocated=True)).run()
    f = w.figures()
    assert w.said['Suspend'] and f['staleness_max'] == 0 and f['colocated']


def test_repack_off_moves_nothing():
    f = World(replace(SMALL, repack=False)).run().figures()
    assert not f['moves'] and not f['released'] and not f['reprefill_tokens'] and not f['repack']


def test_interval():
    assert interval([(float(i), 100) for i in range(11)]) == (100, 0)
    mean, half = interval([(0., 0)] + [(i + .02 * i * i, 100) for i in range(1, 21)])
    assert 60 < mean < 100 and half > 5


@pytest.mark.parametrize('alike', [0., .5, 1.])
def test_lengths_keep_their_distribution(alike):
    for lengths in (known('reasoning', 16_384, alike), lognormal(300, 1.2, alike=alike), constant(9, alike=alike)):
        n = np.array([length_of(lengths, 3, 4 * g + i, g) for g in range(600) for i in range(4)])
        for q in (.25, .5, .75): assert abs((n <= lengths.at(q)).mean() - q) < .08 or lengths.at(0.) == lengths.at(1.)
        assert n.max() <= lengths.most and (np.diff(lengths.at(GRID)) >= 0).all()
