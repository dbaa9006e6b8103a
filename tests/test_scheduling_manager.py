"The rollout manager under any order of events, in a small world with faults, and at its edges"
import random
from collections import Counter
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from laminar_sdk.core import events as ev
from laminar_sdk.core.config import Buffer, Curriculum, Eval, GRPO, Mixture, ReMax, Repack
from laminar_sdk.core.errors import ConfigError, RunError
from laminar_sdk.scheduling import commands as cm
from laminar_sdk.scheduling.cursor import PromptCursor
from laminar_sdk.scheduling.ledger import Ledger
from laminar_sdk.scheduling.manager import RolloutManager
from laminar_sdk.scheduling.outcomes import MAX_LOSSES
from scheduling_world import Journal, World, config


BUFFERS = (Buffer(order='freshest', overdue=1), Buffer(order='priority', priority='-mean(lengths) / staleness'), Buffer(evict_after=0), Buffer(groups='complete'))

# ---- any order of events -------------------------------------------------------------------------------------------

class ManagerMachine(RuleBasedStateMachine):
    "Plays all shells. What a command asks for lies on a pile until a rule happens to do it, twice, late, or never"

    @initialize(steps=st.integers(1, 3), pps=st.integers(1, 2), size=st.integers(1, 3), slack=st.integers(0, 2), n_eval=st.integers(0, 2),
                hosts=st.integers(1, 2), rollouts=st.integers(1, 3), every=st.integers(0, 2), keep=st.integers(1, 2),
                most=st.sampled_from([None, None, 1., 1.5, 3.]), buffer=st.sampled_from([Buffer(), Buffer(), *BUFFERS]), mixed=st.booleans(), make=st.sampled_from([GRPO, GRPO, ReMax]))
    def begin(self, steps, pps, size, slack, n_eval, hosts, rollouts, every, keep, most, buffer, mixed, make):
        algorithm = make(group_size=size)
        if most is not None and algorithm.members > 1: algorithm = make(group_size=size, dynamic_sampling=True, refill_most=most)
        self.cfg = config(steps=steps, prompts_per_step=pps, max_groups=pps + slack, algorithm=algorithm, eval=Eval(every=every, samples=1 + slack),
                          keep_checkpoints=keep, buffer=buffer, mixture=Mixture(curriculum=Curriculum(window=2)) if mixed else None)
        self.n, self.hosts, self.rollouts = (dict(a=2, b=1) if mixed else 3, n_eval), hosts, {r: r % hosts for r in range(rollouts)}
        self.manager, self.journal, self.t = RolloutManager(self.cfg, *self.n), Journal(), 0.
        self.waves, self.seats, self.answers, self.given, self.old = [], [], [], [], []
        self.arriving, self.alive, self.step, self.saved, self.lineage = [], set(), 0, [0], {}
        self.end, self.evals = None, {}
        self.actor_up(0)

    def feed(self, event):
        m = self.manager
        position, paused, ended = m.dispatch.cursor.position, m.paused, m.ended
        commands = m.on(event)
        assert m.check() == [], event
        groups = m.dispatch.groups()
        if m.dispatch.cursor.position > position: assert groups['in_flight'] + groups['buffered'] <= self.cfg.groups_bound
        if paused and not isinstance(event, ev.Resumed): assert not any(isinstance(c, (cm.StartWave, cm.GiveBatch)) for c in commands)
        if ended: assert commands == []
        self.journal.commit(m.ledger.drain())
        for c in commands: getattr(self, f'do_{type(c).__name__}', lambda c: None)(c)

    def do_StartWave(self, c):
        assert c.rollout in self.alive and c.placements and len({p.kind for p in c.placements}) == 1
        self.waves = [w for w in self.waves if w.rollout != c.rollout] + [c]
    def do_Abort(self, c): self.waves, self.seats = [w for w in self.waves if w.rollout != c.rollout], [x for x in self.seats if x[0] != c.rollout]
    def do_ScoreGroup(self, c): self.answers.append(c)
    def do_GiveBatch(self, c):
        assert c.incarnation == self.incarnation
        for s, groups in self.lineage.items(): assert s == c.step or not set(groups) & set(c.groups), 'a group is given to two steps of one lineage'
        assert self.lineage.get(c.step, c.groups) == c.groups and len(c.groups) == self.cfg.prompts_per_step
        self.given = [c]
    def do_ReportEval(self, c):
        assert len(c.reward) == self.n[1] * self.cfg.eval.samples
        assert self.evals.setdefault((c.step, c.version), c) is not None
    def do_EndRun(self, c):
        assert self.end is None
        self.end = c

    # rollouts
    @rule(data=st.data())
    def join(self, data):
        r = data.draw(st.sampled_from(sorted(self.rollouts)))
        self.waves, self.seats = [w for w in self.waves if w.rollout != r], [x for x in self.seats if x[0] != r]
        self.alive.add(r)
        self.feed(ev.RolloutJoined(r, self.rollouts[r], 3))

    @rule(data=st.data())
    def die(self, data):
        if not self.alive: return
        r = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(r)
        self.old += [x for x in self.seats if x[0] == r]
        self.waves, self.seats = [w for w in self.waves if w.rollout != r], [x for x in self.seats if x[0] != r]
        self.feed(ev.RolloutLost(r, 'killed'))

    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def pull(self, data, works):
        if not self.waves: return
        w = self.waves.pop(data.draw(st.integers(0, len(self.waves) - 1)))
        if not works: return self.feed(ev.PullFailed(w.rollout, w.wave, w.version, 'no'))
        self.seats += [(w.rollout, p) for p in w.placements]
        self.feed(ev.WaveStarted(w.rollout, w.wave, w.version))

    @rule(data=st.data(), finish=st.sampled_from(['stop', 'length', 'stop', 'abort', None, 'refused']))
    def report(self, data, finish):
        if not self.seats: return
        i = data.draw(st.integers(0, len(self.seats) - 1))
        r, p = self.seats[i] if finish is None else self.seats.pop(i)
        assert self.manager.accepts(r, p.trajectory, p.lease)
        if finish == 'refused': self.feed(ev.Refused(r, p.trajectory, p.lease, 'too long'))
        else: self.feed(ev.Progress(r, [p.trajectory], [p.lease], [4], [finish]))
        if finish: self.old.append((r, p))

    @rule(data=st.data())
    def report_from_the_grave(self, data):
        "An old report once more: fenced by the shell, and harmless even if it were not"
        if not self.old: return
        r, p = data.draw(st.sampled_from(self.old))
        before = self.manager.ledger.counts()
        self.feed(ev.Progress(r, [p.trajectory], [p.lease], [4], ['stop']))
        assert self.manager.ledger.counts() == before

    # data
    @rule(data=st.data(), fate=st.sampled_from(['good', 'good', 'twice', 'differ', 'one_fails', 'last_fails', 'all_fail', 'nan']))
    def score(self, data, fate):
        if not self.answers: return
        c = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        good = {t: 1. for t in c.trajectories}
        if fate == 'differ': good = {t: float(i) for i, t in enumerate(c.trajectories)}
        if fate == 'one_fails': del good[c.trajectories[0]]
        if fate == 'last_fails': del good[c.trajectories[-1]] # where there is one, the greedy answer
        if fate == 'all_fail': good = {}
        if fate == 'nan': good[c.trajectories[0]] = float('nan')
        event = ev.GroupScored(c.group, good, {t: 'reward_error' for t in c.trajectories if t not in good}, leases=dict(zip(c.trajectories, c.leases)))
        for _ in range(1 + (fate == 'twice')): self.feed(event)

    @rule()
    def data_dies(self): self.feed(ev.DataLost()) # its answers may still come: their leases are old

    # weights
    @rule(data=st.data())
    def arrive(self, data):
        if not self.arriving: return
        v, step, incarnation = data.draw(st.sampled_from(self.arriving))
        self.feed(ev.VersionReady(data.draw(st.integers(0, self.hosts - 1)), v, step, incarnation, f'c{v}'))

    @rule(host=st.integers(0, 1))
    def relay_dies(self, host): self.feed(ev.RelayLost(host % self.hosts, 'killed'))

    # actor
    def actor_up(self, step):
        self.incarnation = self.manager.ledger.incarnation + 1
        self.step, self.given, self.saved = step, [], [s for s in self.saved if s <= step]
        self.lineage = {s: g for s, g in self.lineage.items() if s <= step}
        self.feed(ev.ActorJoined(self.incarnation, step))
        self.publish(step)

    def publish(self, step):
        v = self.manager.issue_version(step, self.incarnation)
        self.journal.commit(self.manager.ledger.drain())
        self.arriving.append((v, step, self.incarnation))
        return v

    @rule()
    def ask(self): self.feed(ev.BatchAsked(self.incarnation, self.step + 1))

    @rule(told=st.sampled_from([True, True, False]), saves=st.booleans())
    def train(self, told, saves):
        "It trains what it was given; perhaps it saves, and dies before it can say so"
        if not self.given: return
        c = self.given.pop()
        self.step, self.lineage[c.step] = c.step, c.groups
        v, e = self.publish(c.step), ev.StepTrained(c.incarnation, c.step, 0)
        if told: self.feed(ev.StepTrained(c.incarnation, c.step, v))
        if saves or c.step == self.cfg.steps:
            self.saved = sorted({*self.saved, c.step})[-self.cfg.keep_checkpoints:]
            if told: self.feed(ev.CheckpointSaved(c.step))
        if not told: self.actor_up(max(self.saved))

    @rule(data=st.data())
    def actor_dies(self, data):
        self.feed(ev.ActorLost(self.incarnation, 'killed'))
        self.feed(ev.StepTrained(self.incarnation - 1, self.step, 0)) # from the grave
        readable = [s for s in self.saved if s >= self.manager.ledger.horizon]
        self.actor_up(data.draw(st.sampled_from(readable)) if readable else self.manager.ledger.horizon)

    # user, coordinator
    @rule(pause=st.booleans())
    def pause(self, pause): self.feed(ev.Paused() if pause else ev.Resumed())

    @rule()
    def ask_eval(self): self.feed(ev.EvalAsked())

    @rule(dt=st.sampled_from([.5, 5., 100.]))
    def tick(self, dt):
        self.t += dt
        self.feed(ev.Tick(self.t))

    @rule()
    def coordinator_dies(self):
        if self.end: return
        self.manager = RolloutManager(self.cfg, *self.n, Ledger.restore(self.journal.rows.values()))
        self.waves, self.old, self.seats, self.alive = [], self.old + self.seats, [], set()
        self.feed(ev.Restarted())
        if self.given: self.ask()

    # in the end
    def teardown(self):
        "No more faults: the run must come to its end, whatever state it is in"
        if not hasattr(self, 'manager'): return
        self.feed(ev.Resumed())
        for r in self.rollouts: self.alive.add(r) or self.feed(ev.RolloutJoined(r, self.rollouts[r], 3))
        for _ in range(400):
            if self.end: break
            self.tick(100.)
            for v, step, i in self.arriving[-1:]:
                for h in range(self.hosts): self.feed(ev.VersionReady(h, v, step, i, f'c{v}'))
            while self.waves: self._pull_first()
            self.seats = [x for x in self.seats if self.manager.outcomes.runs(x[1].trajectory, x[1].lease)]
            while self.seats:
                r, p = self.seats.pop()
                self.feed(ev.Progress(r, [p.trajectory], [p.lease], [4], ['stop']))
            while self.answers:
                c = self.answers.pop()
                self.feed(ev.GroupScored(c.group, {t: 1. for t in c.trajectories}, leases=dict(zip(c.trajectories, c.leases))))
            if not self.given: self.ask()
            self.train(True, True)
        assert self.end, self.manager.status()
        if self.end.state == 'done':
            assert sorted(self.lineage) == list(range(1, self.cfg.steps + 1))
            assert self.manager.ledger.counts()['pending'] == self.manager.ledger.counts()['running'] == 0
            assert not self.n[1] or self.cfg.steps in {s for s, _ in self.evals}
        else: assert self.end.state == 'failed' and 'groups in a row failed' in self.end.reason

    def _pull_first(self):
        w = self.waves.pop(0)
        self.seats += [(w.rollout, p) for p in w.placements]
        self.feed(ev.WaveStarted(w.rollout, w.wave, w.version))

    @invariant()
    def restorable(self):
        "At every moment the journal's rows give the same counts, and add up"
        if not hasattr(self, 'manager') or len(self.old) % 4: return
        again = Ledger.restore(self.journal.rows.values())
        assert again.audit() == [] and again.counts() == self.manager.ledger.counts() and again.counts('eval') == self.manager.ledger.counts('eval')
        assert again.filtered == self.manager.ledger.filtered and again.meta.get('cursor') in (None, self.manager.dispatch.cursor.kept)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=50, stateful_step_count=50, suppress_health_check=list(HealthCheck))


# ---- a small world -------------------------------------------------------------------------------------------------

FAULTS = ('rollout', 'pull', 'actor', 'data', 'relay', 'pause', 'eval', 'coordinator')

def trained_once(world):
    "Each step has its groups, each group one step, and all that was admitted came to an end"
    cfg, ledger = world.cfg, world.manager.ledger
    assert world.ended.state == 'done', world.ended
    assert sorted(world.lineage) == list(range(1, cfg.steps + 1))
    groups = [g for gs in world.lineage.values() for g in gs]
    assert len(set(groups)) == len(groups) == cfg.steps * cfg.prompts_per_step
    counts = ledger.counts()
    assert counts['pending'] == counts['running'] == counts['buffered'] == counts['sampled'] == 0 and ledger.audit() == []
    rows = [r for r in world.journal.rows.values() if type(r).__name__ == 'GroupRow' and r.kind == 'train']
    assert {r.id for r in rows if r.state == 'trained'} == set(groups) and {r.state for r in rows} <= {'trained', 'failed'}
    assert sorted(r.position for r in rows) == list(range(len(rows))) # no prompt skipped, none handed out twice
    again = Ledger.restore(world.journal.rows.values())
    assert again.counts() == counts and again.counts('eval') == ledger.counts('eval') and again.audit() == []
    return rows


def test_every_prompt_in_its_turn():
    "Ten prompts, 24 groups: each prompt twice, four of them a third time, in the cursor's order"
    world = World(config(), n_prompts=10).run()
    rows = sorted(trained_once(world), key=lambda r: r.position)
    assert [r.position for r in rows] == list(range(24))
    assert [r.prompt for r in rows] == PromptCursor(10, world.cfg.seed).take(24)


@pytest.mark.parametrize('seed', range(14))
def test_a_run_with_every_fault_comes_to_its_end(seed):
    world = World(config(eval=Eval(every=2)), n_prompts=10, n_eval=5, seed=seed, faults=FAULTS, fault_every=(3., 8.)[seed % 2],
                  refuse=.02, unscorable=.03, calm_at=45.).run()
    trained_once(world)
    assert world.cfg.steps in {e.step for e in world.evals}


SCHEDULES = ('laminar', 'sync', 'one_step', 'stream', 'partial', 'inflight')
ELASTIC = (*FAULTS, 'scale', 'drain', 'pause_now')

@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('k', [None, 0, 2])
def test_every_schedule_comes_to_its_end_within_its_bound(schedule, k):
    "Without faults staleness never exceeds the bound, and the schedule's own"
    world = World(config(schedule=schedule, max_staleness=k, steps=8), seed=3, repack_every=.5).run()
    trained_once(world)
    worst = max(r.staleness_max for r in world.journal.rows.values() if type(r).__name__ == 'StepRow')
    own = dict(sync=0, one_step=1, stream=1).get(schedule, 99)
    assert worst <= min(own, 99 if k is None else k)
    assert world.said['Forget'] == 0 and len(world.lineage) == 8


@pytest.mark.parametrize('k', [None, 2])
def test_stream_shows_the_actor_what_it_will_be_given(k):
    "While it waits it hears of groups as they finish, nothing is written down for that, and its batch holds them all; the other schedules show nothing"
    world = World(config(schedule='stream', max_staleness=k, steps=8), seed=5).run()
    trained_once(world)
    assert world.said['GiveEarly'] > 8 and all(world.forecast) and len(world.forecast) == 8
    assert World(config(schedule='one_step', steps=3), seed=5).run().said['GiveEarly'] == 0


def test_no_more_is_generated_at_a_time_than_was_allowed():
    for schedule in SCHEDULES:
        world = World(config(schedule=schedule, max_in_flight=3, max_groups=16, steps=4, prompts_per_step=4), seed=2)
        feed, most = world.feed, []
        world.feed = lambda e: (feed(e), most.append(world.manager.dispatch.groups()['in_flight']))[0]
        world.run()
        trained_once(world)
        assert max(most) == 3, schedule


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('seed', range(2))
def test_every_schedule_survives_every_fault(schedule, seed):
    world = World(config(schedule=schedule, eval=Eval(every=2), max_staleness=(None, 2)[seed], colocated=schedule == 'sync' and seed == 0), n_prompts=10,
                  n_eval=5, seed=seed, faults=ELASTIC, fault_every=4., refuse=.02, unscorable=.03, calm_at=45., repack_every=.5).run()
    trained_once(world)


def test_tails_are_packed_and_nothing_of_them_is_lost():
    "Moves happen, plans keep their promises (the world checks prefixes and whole answers), and what was moved was not begun again"
    world = World(config(steps=12, prompts_per_step=8, algorithm=GRPO(group_size=4)), n_prompts=30, rollouts=6, hosts=1, capacity=16, seed=1,
                  repack_every=.5, kv_tokens=4000, tail=3.).run()
    trained_once(world)
    plans, done = ([e for e in world.told if isinstance(e, t)] for t in (ev.Repacked, ev.RepackDone))
    assert len(plans) == len(done) > 5 and sum(e.moved for e in done) > 20 and sum(e.tokens for e in done) > 100
    assert all(set(p.source).isdisjoint(p.dest) and max(p.kv_after) <= .9 for p in plans) and world.said['Forget'] == 0
    moved = [r for r in world.journal.rows.values() if type(r).__name__ == 'TrajectoryRow' and r.moves]
    assert sum(r.moves for r in moved) >= sum(e.moved for e in done) # the others went on after a refused answer of their rollout
    still = World(config(steps=12, prompts_per_step=8, algorithm=GRPO(group_size=4)), n_prompts=30, rollouts=6, hosts=1, capacity=16, seed=1,
                  repack_every=.5, kv_tokens=4000, tail=3., repack_on=False).run()
    assert not [e for e in still.told if isinstance(e, ev.Repacked)]


def test_answers_that_alone_exceed_the_kv_budget_still_come_to_their_end():
    "A cache of 40 tokens, answers of up to hundreds: they cannot be moved, and nothing waits for it"
    world = World(config(steps=6), seed=2, kv_tokens=40, repack_every=.5, faults=('rollout',), fault_every=5., calm_at=30.).run()
    trained_once(world)
    assert all(max(e.kv_after) <= .9 for e in world.told if isinstance(e, ev.Repacked))


def test_two_thousand_prompts_each_once():
    "A fixed set, run to its end: each prompt is trained on exactly once, also under a bound on staleness and with rollouts that die"
    world = World(config(steps=125, prompts_per_step=16, algorithm=GRPO(group_size=1), max_staleness=2, checkpoint_every=10), n_prompts=2000, rollouts=6,
                  capacity=16, kv_tokens=4000, tail=.3, report_s=1., tick_s=1., faults=('rollout', 'relay'), fault_every=20., calm_at=1e9, check=False)
    rows = trained_once(world.run(10 ** 6))
    assert sorted(r.prompt for r in rows) == list(range(2000))


def slope(x, y): # of a logistic regression, and its standard error
    import numpy as np
    x, y = (np.asarray(x, float) - np.mean(x)) / np.std(x), np.asarray(y, float)
    X, w = np.stack([np.ones_like(x), x], 1), np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-X @ w))
        H = X.T @ (X * (p * (1 - p))[:, None]) + 1e-9 * np.eye(2)
        w = w + np.linalg.solve(H, X.T @ (y - p))
    return w[1], np.linalg.inv(H)[1, 1] ** .5

def test_nothing_is_dropped_for_being_long():
    """Trajectories admitted in a window of steady state, each followed until it is final: their fate does not depend on their length.
    The control throws away what would be staler than one version, as others do, and fails the same test"""
    common = dict(n_prompts=500, rollouts=6, capacity=16, kv_tokens=10_000, tail=2., report_s=1., tick_s=1., refuse=.05, check=False)
    shape = dict(steps=60, prompts_per_step=8, algorithm=GRPO(group_size=2), max_groups=32)
    world = World(config(**shape, max_staleness=1), **common).run(10 ** 6)
    rows = [r for r in world.journal.rows.values() if type(r).__name__ == 'TrajectoryRow' and 160 < r.id < 800]
    assert all(r.state in ('trained', 'failed') for r in rows) and world.said['Forget'] == 0
    b, error = slope([world.length(r.id) for r in rows], [r.state != 'trained' for r in rows])
    assert abs(b) < 1.96 * error
    loose = World(config(**shape), **common).run(10 ** 6)
    late = {s.step: s.newest for s in loose.journal.rows.values() if type(s).__name__ == 'StepRow'}
    rows = [r for r in loose.journal.rows.values() if type(r).__name__ == 'TrajectoryRow' and 160 < r.id < 800 and r.state == 'trained']
    b, error = slope([loose.length(r.id) for r in rows], [late[r.step] - r.version > 1 for r in rows])
    assert b > 1.96 * error


@pytest.mark.parametrize('seed', range(4))
def test_a_coordinator_that_dies_all_the_time(seed):
    trained_once(World(config(steps=4), seed=seed, n_eval=3, faults=('coordinator',), fault_every=1.).run())


@pytest.mark.long
@pytest.mark.parametrize('seed', range(1000, 1040))
def test_longer_runs_with_more_rollouts(seed):
    trained_once(World(config(steps=30, prompts_per_step=8, eval=Eval(every=5)), n_prompts=50, n_eval=20, rollouts=8, hosts=3, seed=seed,
                       faults=FAULTS, fault_every=5., refuse=.01, unscorable=.02, calm_at=200.).run(500_000))


@pytest.mark.parametrize('seed', range(3))
def test_staleness_is_bounded_by_admission(seed):
    "A bound of one step's worth: all that is in flight is in the next batch, so nothing is more than one version behind"
    world = World(config(max_groups=4, steps=8), seed=seed).run()
    assert max(r.staleness_max for r in world.journal.rows.values() if type(r).__name__ == 'StepRow') <= 1
    loose = World(config(max_groups=16, steps=8), seed=seed).run()
    assert max(r.staleness_max for r in loose.journal.rows.values() if type(r).__name__ == 'StepRow') > 1 # the bound does it, not the world


def test_the_same_events_give_the_same_commands():
    world = World(config(eval=Eval(every=2)), n_eval=4, seed=5, faults=('rollout', 'pull', 'data', 'relay', 'pause')).run()
    again = RolloutManager(world.cfg, *world.n)
    for event, commands in world.log: assert again.on(event) == commands, event


def test_a_run_without_faults_loses_nothing():
    world = World(config()).run()
    assert world.manager.ledger.meta['trajectories'] == 72 and world.said['Forget'] == 0 and world.manager.ledger.stale_reports < 20


# ---- one thing at a time -------------------------------------------------------------------------------------------

class Hand:
    "A manager and a hand to feed it; version 0 is on host 0"
    def __init__(self, n_prompts=50, n_eval=0, rollouts=1, capacity=8, **over):
        self.m = RolloutManager(config(**{**dict(steps=2, prompts_per_step=1, algorithm=GRPO(group_size=2)), **over}), n_prompts, n_eval)
        self.todo = []
        self.out = self(ev.ActorJoined(1, 0), *(ev.RolloutJoined(r, 0, capacity) for r in range(rollouts)), self.ready())

    def __call__(self, *events):
        out = []
        for e in events:
            out += self.m.on(e)
            assert self.m.check() == [], e
        self.todo += out
        return out

    def ready(self, step=0, incarnation=1, host=0): return ev.VersionReady(host, self.m.issue_version(step, incarnation), step, incarnation, 'c')
    def waves(self, out): return [c for c in out if isinstance(c, cm.StartWave)]
    def end(self, wave, finish='stop'):
        p = wave.placements
        return self(ev.Progress(wave.rollout, [x.trajectory for x in p], [x.lease for x in p], [3] * len(p), [finish] * len(p)))
    def score(self, out, **over):
        return self(*(ev.GroupScored(c.group, **{**dict(reward={t: 1. for t in c.trajectories}), **over}) for c in out if isinstance(c, cm.ScoreGroup)))
    def play(self, rewards=lambda c: {t: 1. for t in c.trajectories}, n=1_000):
        "End every wave and score every group, n of them"
        while self.todo and n and not self.m.ended:
            c = self.todo.pop(0)
            if isinstance(c, cm.StartWave): self.end(c)
            if isinstance(c, cm.ScoreGroup): n = self(ev.GroupScored(c.group, rewards(c), error="KeyError: 'answer'")) is not None and n - 1
        return self.todo
    def kinds(self, out): return [type(c).__name__ for c in out]


@pytest.mark.parametrize('kills', [5, MAX_LOSSES + 5])
def test_a_bound_of_one_group_whose_member_is_killed_again_and_again(kills):
    "Below the limit it comes through in the end; above it is given up, and its group goes on without it. Never a standstill"
    hand = Hand(max_groups=1, rollouts=2)
    wave, = hand.waves(hand.out)
    first, second = wave.placements
    out = hand(ev.Progress(wave.rollout, [first.trajectory], [first.lease], [3], ['stop']))
    rollout, killed = wave.rollout, 0
    while killed < kills and hand.m.ledger.rows[second.trajectory].state == 'running':
        out = hand(ev.RolloutLost(rollout, 'killed'), ev.RolloutJoined(rollout, 0, 8))
        killed += 1
        assert hand.m.dispatch.groups()['in_flight'] == 1
        if waves := hand.waves(out): (wave,), rollout = waves, waves[0].rollout
    assert killed == min(kills, MAX_LOSSES)
    if kills < MAX_LOSSES: out = hand.end(wave)
    hand.score(out)
    batch, *_ = hand(ev.BatchAsked(1, 1))
    assert batch.trajectories == [[first.trajectory, second.trajectory] if kills < MAX_LOSSES else [first.trajectory]]
    assert len(hand.m.ledger.groups) == 2 # and the next group was admitted


def test_a_batch_is_asked_twice_and_given_twice_the_same():
    hand = Hand()
    assert hand(ev.BatchAsked(1, 1)) == []
    give = [c for c in hand.score(hand.end(hand.waves(hand.out)[0])) if isinstance(c, cm.GiveBatch)]
    assert len(give) == 1 and hand(ev.BatchAsked(1, 1)) == give
    assert hand(ev.BatchAsked(0, 1)) == [] # an earlier life of the actor


def test_what_a_dead_actor_says_is_ignored():
    hand = Hand()
    hand.play(n=1)
    hand(ev.BatchAsked(1, 1))
    v = hand.m.issue_version(1, 1)
    hand(ev.ActorLost(1, 'killed'), ev.ActorJoined(2, 0), ev.StepTrained(1, 1, v), ev.CheckpointSaved(1))
    assert hand.m.ledger.trained_step == 0 and hand.m.ledger.checkpoints == [0] and hand.m.ledger.counts()['buffered'] == 2
    hand(ev.BatchAsked(2, 1), ev.StepTrained(1, 1, v))
    assert hand.m.ledger.steps[1].state == 'sampled' # its successor has just begun with the same step
    with pytest.raises(RunError, match='incarnation 1'): hand.m.issue_version(1, 1)


def test_a_step_that_is_taken_again_gets_the_groups_that_it_had():
    hand = Hand(prompts_per_step=2, max_groups=6, steps=9)
    hand.play(n=4)
    first, = [c for c in hand(ev.BatchAsked(1, 1)) if isinstance(c, cm.GiveBatch)]
    hand.play(n=2)
    again, = [c for c in hand(ev.ActorJoined(2, 0), ev.BatchAsked(2, 1)) if isinstance(c, cm.GiveBatch)]
    assert again.groups == first.groups == [1, 2] and len(hand.m.ledger.buffer) == 4


def test_an_evaluation_of_a_step_that_was_undone_is_not_due():
    hand = Hand(n_eval=2, eval=Eval(every=1))
    hand.play()
    hand(ev.RolloutLost(0, 'killed'), ev.BatchAsked(1, 1), ev.StepTrained(1, 1, hand.m.issue_version(1, 1)))
    assert hand.m.evals.due == [[1, 1]]
    hand(ev.ActorJoined(2, 0))
    assert hand.m.evals.due == []


def test_after_a_restart_nobody_is_known_until_he_says_so():
    hand = Hand()
    hand(ev.BatchAsked(1, 1), ev.Restarted())
    assert not hand.m.fleet.rollouts and hand.m.fleet.newest() is None and hand.m.batches.asked is None


def test_a_new_coordinator_goes_on_with_what_the_pool_still_has():
    "Trajectory 1 has 7 tokens in the pool under its lease, 2 was placed again since; only 1 goes on, and at its own version"
    hand = Hand(rollouts=1)
    hand(ev.Progress(0, [1, 2], [1, 1], [5, 5], [None, None]))
    m = RolloutManager(hand.m.config, 50, 0, Ledger.restore(hand.m.ledger.drain()), keep_versions=4)
    assert m.on(ev.Restarted({1: (1, 7), 2: (0, 5), 99: (1, 3)})) == [cm.Forget([2])] and m.check() == []
    assert m.on(ev.Tick(100.)) == [] and m.ledger.rows[1].length == 7 # nobody has been heard of yet: that is no reason to give its tokens up
    v1 = m.issue_version(0, 1)
    out = [*m.on(ev.VersionReady(0, 0, 0, 1, 'c')), *m.on(ev.VersionReady(0, v1, 0, 1, 'd')), *m.on(ev.RolloutJoined(0, 0, 8))]
    wave, = hand.waves(out)
    assert wave.version == 0 and [(p.trajectory, p.lease, p.first) for p in wave.placements] == [(1, 2, 7)]
    out = m.on(ev.Progress(0, [1], [2], [9], ['stop']))
    assert [(p.trajectory, p.first) for w in hand.waves(out) for p in w.placements][:1] == [(2, 0)] and m.check() == []


def on_the_way():
    "Three rollouts with tails; a plan is under way. A hand, the source, what it has been told to stop, and the destination"
    hand = Hand(rollouts=3, prompts_per_step=3, max_groups=6, steps=9, repack=Repack(every=1.))
    report = lambda t, kv: hand(ev.Tick(t), *(ev.Progress(r, list(x.running), [hand.m.ledger.rows[i].lease for i in x.running], [6] * len(x.running), [None] * len(x.running),
                                                        kv, len(x.running), 0, int(100 * kv)) for r, x in hand.m.fleet.rollouts.items()))
    report(1., .5)
    hand(ev.Tick(2.))
    report(2.5, .3)
    plan = [c for c in hand(ev.Tick(3.)) if isinstance(c, cm.Abort)]
    source, ids = plan[0].rollout, plan[0].trajectories
    return hand, source, ids, hand.m.moves.under_way[ids[0]].dest


def test_who_was_on_his_way_when_the_destination_died_waits_with_his_tokens():
    "Destination first, source after: nothing is begun again, and the old lease is void"
    hand, source, ids, dest = on_the_way()
    hand(ev.RolloutLost(dest, 'killed'))
    out = hand(ev.RolloutLost(source, 'killed'))
    assert hand.m.moves.under_way == {} or all(t not in hand.m.moves.under_way for t in ids)
    assert not [c for c in out if isinstance(c, cm.Forget)] and all(hand.m.ledger.rows[t].length == 6 for t in ids)
    assert not hand.m.accepts(source, ids[0], 1)
    seats = [p for c in hand.todo if isinstance(c, (cm.StartWave, cm.Continue)) for p in c.placements if p.trajectory in ids and p.first == 6]
    assert {p.trajectory for p in seats} == set(ids) # the third rollout, which has their version, goes on with them


def test_a_pull_that_fails_while_trajectories_are_being_moved_in():
    "The destination turns out to have no weights: what was on its way waits with its tokens, and so does what it had itself; others go on with all of it"
    hand, _, _, dest = on_the_way()
    rows, r = hand.m.ledger.rows, hand.m.fleet.rollouts[dest]
    had, coming = list(r.running), {t: rows[t].rollout for t in hand.m.moves.under_way}
    hand(ev.PullFailed(dest, r.wave, 0, 'its relay has just died'))
    assert not r.expected and not r.running and all(rows[t].length == 6 for t in had)
    for source in {*coming.values()}: # the sources' last words
        ids = [t for t in coming if coming[t] == source]
        hand(ev.Progress(source, ids, [1] * len(ids), [9] * len(ids), ['abort'] * len(ids)))
    assert not hand.m.moves.under_way and not [c for c in hand.todo if isinstance(c, cm.Forget)]
    seats = {p.trajectory: (c.rollout, p.first) for c in hand.todo if isinstance(c, (cm.StartWave, cm.Continue)) for p in c.placements if p.first}
    assert {t: seats[t][1] for t in seats} == dict.fromkeys(coming, 9) | dict.fromkeys(had, 6) and dest not in {i for i, _ in seats.values()}


def test_a_completion_that_comes_twice_after_a_move():
    "From the source, under the lease that it had: refused. From the destination, twice: once. The answer is scored once, and every count adds up"
    hand, source, ids, dest = on_the_way()
    out = hand(ev.Progress(source, ids, [1] * len(ids), [9] * len(ids), ['abort'] * len(ids)))
    moved = {p.trajectory: p.lease for c in out if isinstance(c, cm.Continue) and c.rollout == dest for p in c.placements}
    assert moved == dict.fromkeys(ids, 2)
    assert not any(hand.m.accepts(source, t, 1) for t in ids) and all(hand.m.accepts(dest, t, 2) for t in ids)
    before = hand.m.ledger.stale_reports
    hand(ev.Progress(source, ids, [1] * len(ids), [12] * len(ids), ['stop'] * len(ids))) # even if the shell had let it through
    assert all(hand.m.ledger.rows[t].state == 'running' and hand.m.ledger.rows[t].finish is None for t in ids) and hand.m.ledger.stale_reports >= before
    end = ev.Progress(dest, ids, [2] * len(ids), [15] * len(ids), ['stop'] * len(ids))
    scored = [c.group for c in hand(end) if isinstance(c, cm.ScoreGroup)]
    assert len(scored) == len(set(scored)) and all(hand.m.ledger.rows[t].length == 15 and hand.m.ledger.rows[t].moves == 1 for t in ids)
    assert [c for c in hand(end) if isinstance(c, cm.ScoreGroup)] == []


def test_no_staleness_at_all():
    "`max_staleness=0`: nobody begins for step 2 before step 1 is trained, and step 2 is generated at the version of step 1"
    hand = Hand(rollouts=2, prompts_per_step=2, max_groups=8, steps=3, max_staleness=0)
    for step in (1, 2, 3):
        began = [c for c in hand.todo if isinstance(c, cm.StartWave)]
        assert {c.version for c in began} == {step - 1} and sum(len(c.placements) for c in began) == 4
        hand.play()
        hand.todo = []
        assert [c for c in hand(ev.Tick(10. * step)) if isinstance(c, cm.StartWave)] == []
        hand(ev.BatchAsked(1, step))
        version = hand.m.issue_version(step, 1)
        hand(ev.StepTrained(1, step, version), ev.VersionReady(0, version, step, 1, 'c'))
        assert hand.m.staleness_of(step) == (0., 0)


def test_a_step_that_was_saved_but_never_reported_counts():
    hand = Hand()
    hand.score(hand.end(hand.waves(hand.out)[0]))
    hand(ev.BatchAsked(1, 1), ev.ActorLost(1, 'killed'), ev.ActorJoined(2, 1))
    assert hand.m.ledger.trained_step == hand.m.ledger.checkpointed == 1 and hand.m.ledger.counts()['trained'] == 2


def test_a_checkpoint_of_another_run_ends_this_one():
    out = Hand()(ev.ActorJoined(2, 7))
    assert isinstance(out[-1], cm.EndRun) and out[-1].state == 'failed' and 'restored at step 7' in out[-1].reason


def test_a_reward_function_that_always_raises_ends_the_run_with_its_reason():
    out = Hand(prompts_per_step=2).play(lambda c: {})
    assert out[-1] == cm.EndRun('failed', "6 groups in a row failed; the last one: KeyError: 'answer'")


def test_some_failures_are_replaced_and_forgiven():
    hand = Hand(steps=3, prompts_per_step=2)
    hand.play(lambda c: {} if c.group % 3 else {t: 1. for t in c.trajectories})
    assert hand.m.dispatch.groups() == dict(in_flight=0, buffered=4, consumed=0) and hand.m.ledger.counts()['failed'] == 16 and not hand.m.ended


def test_a_run_that_learns_nothing_any_more_pauses_and_says_why():
    hand = Hand(steps=9)
    for step in (1, 2, 3):
        hand.play()
        out = hand(ev.BatchAsked(1, step), ev.StepTrained(1, step, hand.m.issue_version(step, 1), dict(skipped=1., updates=0.)))
        assert hand.m.paused == (step == 3)
    assert [c.event.level for c in out if isinstance(c, cm.Tell)] == ['warning', 'error']
    hand(ev.Resumed())
    assert not hand.m.paused


def test_no_wave_and_no_batch_while_paused():
    hand = Hand()
    hand(ev.Paused())
    out = hand.score(hand.end(hand.waves(hand.out)[0]))
    assert hand.waves(out) == [] and hand(ev.BatchAsked(1, 1), ev.VersionReady(0, 0, 0, 1, 'c')) == []
    assert hand.kinds(hand(ev.Resumed())) == ['GiveBatch', 'StartWave']


def test_a_pause_outlives_the_coordinator():
    hand = Hand()
    hand(ev.Paused())
    m = RolloutManager(hand.m.config, 50, 0, Ledger.restore(hand.m.ledger.drain()))
    assert m.paused and [type(c).__name__ for c in m.on(ev.Restarted())] == ['Forget']
    assert m.on(ev.RolloutJoined(0, 0, 8)) == m.on(ev.VersionReady(0, 0, 0, 1, 'c')) == []
    assert [type(c) for c in m.on(ev.Resumed())] == [cm.StartWave]


def test_stop_aborts_all_and_ends_once():
    hand = Hand(rollouts=2, prompts_per_step=2)
    out = hand(ev.StopAsked('enough'))
    assert hand.kinds(out) == ['Abort', 'Abort', 'Forget', 'EndRun'] and out[-1] == cm.EndRun('stopped', 'enough')
    assert hand(ev.StopAsked(), ev.RolloutJoined(0, 0, 8)) == [] and hand.m.ledger.counts()['running'] == 0


def test_who_outlives_his_rollout_gets_a_new_lease_and_the_old_one_is_refused():
    hand = Hand(rollouts=2, max_groups=1)
    wave, = hand.waves(hand.out)
    out = hand(ev.RolloutLost(wave.rollout, 'killed'))
    ids = [p.trajectory for p in wave.placements]
    other, = hand.waves(out)
    assert [(p.trajectory, p.lease) for p in other.placements] == [(t, 2) for t in ids] and other.rollout != wave.rollout
    assert not hand.m.accepts(wave.rollout, ids[0], 1) and not hand.m.accepts(wave.rollout, ids[0], 2) and hand.m.accepts(other.rollout, ids[0], 2)
    assert hand.m.ledger.stale_reports == 2


def test_lost_data_is_generated_again_even_if_it_had_ended():
    hand = Hand(prompts_per_step=2)
    score, = [c for c in hand(ev.Progress(0, [1, 2, 3], [1, 1, 1], [3] * 3, ['stop'] * 3)) if isinstance(c, cm.ScoreGroup)]
    out = hand(ev.DataLost())
    assert hand.kinds(out) == ['Abort', 'Forget', 'StartWave'] and sorted(out[1].trajectories) == [1, 2, 3, 4]
    assert hand(ev.GroupScored(score.group, {1: 1., 2: 1.}, leases=dict(zip(score.trajectories, score.leases)))) == []
    assert hand.m.outcomes.stale_answers == 1 and hand.m.ledger.counts()['running'] == 4
    hand(ev.Progress(0, [1, 2], [2, 2], [3] * 2, ['stop'] * 2)) # the group is being scored again when the old answer comes
    assert hand(ev.GroupScored(score.group, {1: 1., 2: 1.}, leases=dict(zip(score.trajectories, score.leases)))) == []
    assert hand.m.outcomes.stale_answers == 2 and hand.m.ledger.groups[score.group].state == 'closed'


def test_a_failed_pull_is_tried_again_later_and_by_others_now():
    hand = Hand(rollouts=2)
    hand(ev.Tick(10.))
    wave, = hand.waves(hand.out[:2])[:1]
    out = hand(ev.PullFailed(wave.rollout, wave.wave, 0, 'no such file'))
    assert hand.m.ledger.counts()['pending'] == 2 and hand.waves(out) == [] # the other is busy
    assert hand(ev.PullFailed(wave.rollout, wave.wave, 0, 'no such file')) == [] # told twice
    hand(ev.RolloutLost(1 - wave.rollout, 'killed'))
    assert hand.waves(hand(ev.Tick(10.5))) == [] and [w.rollout for w in hand.waves(hand(ev.Tick(11.)))] == [wave.rollout]


def test_work_is_shared_and_nobody_starves():
    "Two groups a step for four rollouts: each gets its turn"
    hand, turns = Hand(rollouts=4, prompts_per_step=2, max_groups=2, steps=50, capacity=64), {r: 0 for r in range(4)}
    for step in range(1, 21):
        for w in hand.waves(hand.todo):
            turns[w.rollout] += 1
            assert len(w.placements) == 2 # one group each, though a rollout could take both
        hand.play()
        hand(ev.BatchAsked(1, step), ev.StepTrained(1, step, hand.m.issue_version(step, 1)))
    assert set(turns.values()) == {10}, turns


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(schedule=st.sampled_from(['laminar', 'sync', 'one_step', 'inflight']), seed=st.integers(0, 99), times=st.sampled_from([2., 3.]))
def test_who_is_faster_gets_more(schedule, seed, times):
    """One of three rollouts is twice (three times) as fast as the others; after a few waves, in which that is measured, it does about twice (three times) as much.
    Where it comes for more when it is done, up to four (nine) times: its waves are larger, and still shorter"""
    world = World(config(steps=40, prompts_per_step=24, algorithm=GRPO(group_size=1), schedule=schedule), n_prompts=50, rollouts=3, hosts=1, capacity=32, seed=seed, kv_tokens=10_000,
                  tail=2., repack_on=False, check=False, pace=(1., times, 1.)).run(10 ** 6)
    done = Counter(r.rollout for r in world.journal.rows.values() if type(r).__name__ == 'TrajectoryRow' and r.id > 240 and r.kind == 'train')
    assert .65 * times < 2 * done[1] / (done[0] + done[2]) < 1.5 * times ** (1 + (schedule in ('laminar', 'inflight'))), (done, {r.id: r.speed for r in world.manager.fleet.rollouts.values()})


def test_scarce_work_is_shared_out():
    "Two permits, two free rollouts that could take both: one each"
    hand = Hand(rollouts=2, prompts_per_step=4, max_groups=4)
    hand(ev.Paused())
    hand.play(lambda c: {} if c.group < 3 else {t: 1. for t in c.trajectories})
    assert [[p.group for p in w.placements] for w in hand.waves(hand(ev.Resumed()))] == [[5, 5], [6, 6]]


def test_a_wave_has_the_newest_version_of_its_own_host():
    hand = Hand(steps=9)
    hand(ev.RolloutJoined(1, host=1, capacity=8))
    hand(ev.RolloutLost(0, 'killed'))
    v1 = hand.ready(1)
    assert hand.waves(hand(v1)) == [] # host 1 has no version yet
    wave, = hand.waves(hand(ev.VersionReady(1, 0, 0, 1, 'c')))
    assert (wave.rollout, wave.version) == (1, 0)


def test_an_evaluation_has_one_version_and_counts_failures_as_wrong():
    hand = Hand(n_eval=5, rollouts=2, capacity=2, steps=1)
    assert hand.out[0] == cm.Pin(0)
    done, out, reports = [], hand.out, []
    hand(hand.ready(1))
    while out:
        waves, out = hand.waves(out), []
        for w in waves:
            if w.placements[0].kind == 'train': continue
            assert w.version == 0 and len(w.placements) <= 2 and all(p.kind == 'eval' for p in w.placements)
            done += [p.prompt for p in w.placements]
            p = w.placements[0]
            if p.prompt == 0: out += hand(ev.Refused(w.rollout, p.trajectory, p.lease, 'too long'))
            out += hand.end(w)
        out += hand.score(out)
        reports += [c for c in out if isinstance(c, (cm.ReportEval, cm.Unpin))]
    assert sorted(done) == [0, 1, 2, 3, 4] and len(reports) == 2 and reports[1] == cm.Unpin(0)
    assert (reports[0].step, reports[0].version) == (0, 0) and sorted(reports[0].reward.values()) == [0., 1., 1., 1., 1.]
    assert sum(hand.m.ledger.counts('eval').values()) == 5 and hand.m.ledger.counts('eval')['failed'] == 1


def test_an_evaluation_whose_version_is_gone_begins_again_with_a_newer_one():
    hand = Hand(n_eval=2)
    wave, = hand.waves(hand.out)
    out = hand(ev.RelayLost(0, 'killed'), ev.PullFailed(0, wave.wave, 0, 'gone'), hand.ready(0))
    assert [type(c).__name__ for c in out if not isinstance(c, cm.StartWave)] == ['Forget', 'Unpin', 'Pin']
    again, = hand.waves(out)
    assert again.version == 1 and len(again.placements) == 2 and hand.m.ledger.counts('eval')['dropped'] == 2


def test_a_group_of_one_and_a_set_smaller_than_a_step():
    world = World(config(algorithm=GRPO(group_size=1), prompts_per_step=4, steps=3), n_prompts=3).run()
    rows = trained_once(world)
    assert sorted(sum(r.prompt == p for r in rows) for p in range(3)) == [4, 4, 4]


def test_a_run_that_is_made_longer_goes_on():
    world = World(config(steps=2)).run()
    m = RolloutManager(config(steps=3), 10, 0, Ledger.restore(world.journal.rows.values()))
    v = m.ledger.newest
    row = m.ledger.versions[v]
    out = [*m.on(ev.Restarted()), *m.on(ev.RolloutJoined(0, 0, 64)), *m.on(ev.VersionReady(0, v, row.step, row.incarnation, row.checksum))]
    assert [type(c) for c in out] == [cm.StartWave] and not m.ended
    assert RolloutManager(config(steps=2), 10, 0, Ledger.restore(world.journal.rows.values())).on(ev.Restarted())[-1].state == 'done'


@pytest.mark.parametrize('over, n_prompts, says', [
    (dict(max_groups=3), 10, 'a step needs prompts_per_step = 4'), (dict(), 0, 'nothing to train on'), (dict(colocated=True), 10, "schedule='sync'")])
def test_what_cannot_work_is_said_at_once(over, n_prompts, says):
    with pytest.raises(ConfigError, match=says): RolloutManager(config(**over), n_prompts)


def test_every_event_has_its_handler():
    m = RolloutManager(config(), 10)
    known = {e for e in ev.Event.__subclasses__() if e is not ev.RelayTold} # what the relays tell has a core of its own
    from laminar_sdk.scheduling.manager import OBSERVATIONS, camel2snake
    assert not [e for e in known - set(OBSERVATIONS) if not hasattr(m, f'on_{camel2snake(e.__name__)}')]
    assert m.on(ev.Notice('info', 'hello')) == []


def test_a_critic_that_cannot_learn_pauses_the_run():
    "Also where the policy still moves, and while it waits for the critic"
    for updates in (0., 1.):
        hand = Hand(steps=9)
        for step in (1, 2, 3):
            hand.play(n=1)
            out = hand(ev.BatchAsked(1, step), ev.StepTrained(1, step, hand.m.issue_version(step, 1), dict(skipped=0., updates=updates, critic_skipped=1., critic_updates=0.)))
        assert hand.m.paused and any('no update' in c.event.text for c in out if isinstance(c, cm.Tell)), out
    hand = Hand(steps=9)
    for step in (1, 2, 3, 4):
        hand.play(n=1)
        out = hand(ev.BatchAsked(1, step), ev.StepTrained(1, step, hand.m.issue_version(step, 1), dict(skipped=0., updates=0., critic_skipped=1., critic_updates=1.)))
    assert not hand.m.paused and any('1 updates skipped' in c.event.text for c in out if isinstance(c, cm.Tell))


def test_a_checkpoint_that_could_not_be_written_pauses_the_run():
    hand = Hand(steps=9)
    hand.play(n=1)
    hand(ev.BatchAsked(1, 1), ev.StepTrained(1, 1, hand.m.issue_version(1, 1)), ev.CheckpointAsked())
    assert hand.m.orders() == {'checkpoint': True}
    out = hand(ev.CheckpointFailed(1, 'OSError: No space left on device'))
    assert hand.m.paused and hand.m.orders() == {} and hand.m.ledger.checkpointed == 0 and 'No space' in out[0].event.text
    hand(ev.Resumed(), ev.CheckpointSaved(1))
    assert not hand.m.paused and hand.m.ledger.checkpointed == 1
