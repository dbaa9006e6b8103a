"The rollout manager under any order of events, in a small world with faults, and at its edges"
import random
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from laminar_sdk.core import events as ev
from laminar_sdk.core.config import Eval, GRPO
from laminar_sdk.core.errors import ConfigError, RunError
from laminar_sdk.scheduling import commands as cm
from laminar_sdk.scheduling.cursor import PromptCursor
from laminar_sdk.scheduling.ledger import Ledger
from laminar_sdk.scheduling.manager import RolloutManager
from laminar_sdk.scheduling.outcomes import MAX_LOSSES
from scheduling_world import Journal, World, config


# ---- any order of events -------------------------------------------------------------------------------------------

class ManagerMachine(RuleBasedStateMachine):
    "Plays all shells. What a command asks for lies on a pile until a rule happens to do it, twice, late, or never"

    @initialize(steps=st.integers(1, 3), pps=st.integers(1, 2), size=st.integers(1, 3), slack=st.integers(0, 2), n_eval=st.integers(0, 2),
                hosts=st.integers(1, 2), rollouts=st.integers(1, 3), every=st.integers(0, 2), keep=st.integers(1, 2))
    def begin(self, steps, pps, size, slack, n_eval, hosts, rollouts, every, keep):
        self.cfg = config(steps=steps, prompts_per_step=pps, max_groups=pps + slack, algorithm=GRPO(group_size=size), eval=Eval(every=every),
                          keep_checkpoints=keep)
        self.n, self.hosts, self.rollouts = (3, n_eval), hosts, {r: r % hosts for r in range(rollouts)}
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
        assert len(c.reward) == self.n[1]
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
    @rule(data=st.data(), fate=st.sampled_from(['good', 'good', 'twice', 'one_fails', 'all_fail', 'nan']))
    def score(self, data, fate):
        if not self.answers: return
        c = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        good = {t: 1. for t in c.trajectories}
        if fate == 'one_fails': del good[c.trajectories[0]]
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


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=50, stateful_step_count=50, suppress_health_check=list(HealthCheck))
