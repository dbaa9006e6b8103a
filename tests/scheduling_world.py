"""A tiny world for the rollout manager: virtual time, seeded faults, a journal in a dict. No processes, no clock."""
import heapq, random
from collections import Counter
import msgspec

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import GRPO, Repack, RunConfig
from laminar_sdk.scheduling import commands as cm
from laminar_sdk.scheduling.books import KEYS
from laminar_sdk.scheduling.ledger import Ledger
from laminar_sdk.scheduling.manager import RolloutManager


RETRIED = (ev.Progress, ev.Refused, ev.GroupScored, ev.StepTrained, ev.CheckpointSaved)


def config(**over):
    base = dict(name='w', model='m', steps=6, prompts_per_step=4, algorithm=GRPO(group_size=3), checkpoint_every=2)
    return RunConfig(**{**base, **over})


class Journal:
    "What SQLite would hold: the newest state of each row"
    def __init__(self): self.rows = {}
    def commit(self, rows):
        for r in rows: self.rows[(type(r), *(getattr(r, k) for k in KEYS[type(r)]))] = r


class Engine:
    "What a rollout's engine is doing"
    def __init__(self, id): self.id, self.wave, self.version, self.flows, self.cut = id, 0, None, {}, {}
    def used(self): return sum(10 + n for _, n in self.flows.values()) # tokens in its KV cache


class World:
    def __init__(self, cfg, n_prompts=10, n_eval=0, hosts=2, rollouts=4, capacity=8, seed=0, faults=(), fault_every=3., calm_at=60.,
                 check=True, refuse=0., unscorable=0., uniform=0., tail=1.5, kv_tokens=1000, report_s=.5, tick_s=.5, keep=2, repack_every=2., repack_on=True,
                 pace=()): # of each rollout: how much faster than usual it decodes, with a knee at its capacity
        cfg = cfg.model_copy(update=dict(repack=Repack(on=repack_on, every=repack_every)))
        self.cfg, self.n = cfg, (n_prompts, n_eval)
        self.rng, self.t, self.queue, self.n_events = random.Random(seed), 0., [], 0
        self.hosts, self.capacity, self.tail, self.kv_tokens, self.report_s, self.tick_s, self.keep = hosts, capacity, tail, kv_tokens, report_s, tick_s, keep
        self.engines, self.told, self.pace = {}, [], dict(enumerate(pace))
        self.host_of = {r: r % hosts for r in range(rollouts)}
        self.life = dict.fromkeys(range(rollouts), 0) # of each rollout
        self.versions = {h: {} for h in range(hosts)} # version -> (step, incarnation), on that relay
        self.faults, self.fault_every, self.calm_at, self.check = faults, fault_every, calm_at, check
        self.refuse, self.unscorable, self.uniform = refuse, unscorable, uniform # of groups: the chance that all rewards are equal
        self.journal, self.manager = Journal(), RolloutManager(cfg, *self.n, keep_versions=keep)
        self.data_life, self.incarnation, self.actor_at, self.busy = 0, 0, 0, False
        self.checkpoints, self.lineage, self.ended, self.evals = [0], {}, None, []
        self.log, self.uncommitted = [], []
        self.tokens, self.pins, self.said = {}, set(), Counter()
        self.early, self.forecast = {}, [] # groups that the actor was shown before its batch, by incarnation and step; whether they were in it
        for r in self.life: self.after(self.rng.uniform(0, 2), self.join, r, 0)
        self.after(1., self.actor_up, 0)
        self.after(1., self.tick)
        if 'scale' in faults: self.after(calm_at + 10, self.feed, ev.ScaleAsked(rollouts))
        for f in faults: self.after(self.rng.expovariate(1 / fault_every), self.fault, f)

    # time
    def after(self, dt, f, *args): heapq.heappush(self.queue, (self.t + dt, self.rng.random(), f, args))

    def run(self, max_events=60_000):
        while self.ended is None:
            assert self.queue and self.n_events < max_events, f'no end in sight at {self.t:.0f} s: {self.manager.status()}'
            self.t, _, f, args = heapq.heappop(self.queue)
            f(*args)
        return self

    # the coordinator: events → manager → one commit for several → commands
    def feed(self, event):
        if self.ended is not None: return
        self.n_events += 1
        before = self.manager.dispatch.cursor.position
        commands = self.manager.on(event)
        if self.check: assert not (bad := self.manager.check()), (event, bad)
        if self.manager.dispatch.cursor.position > before:
            n = self.manager.dispatch.groups()
            assert n['in_flight'] + n['buffered'] <= self.cfg.groups_bound, f'admitted beyond the bound: {n}'
        self.log.append((event, commands))
        self.uncommitted.append((event, commands))
        if self.rng.random() < .7: self.commit()
        else: self.after(.02, self.commit)

    def commit(self):
        batch, self.uncommitted = self.uncommitted, []
        self.journal.commit(self.manager.ledger.drain())
        for _, commands in batch:
            for c in commands:
                self.said[type(c).__name__] += 1
                getattr(self, f'do_{type(c).__name__}')(c)

    def tick(self):
        self.feed(ev.Tick(self.t))
        self.after(self.tick_s, self.tick)

    # rollouts: each decodes what it has, says so every `report_s`, and perhaps says it twice, or after it is taken for dead
    def join(self, r, life):
        if self.life[r] != life: return
        self.engines[r] = Engine(r)
        self.feed(ev.RolloutJoined(r, self.host_of[r], self.capacity, kv_tokens=self.kv_tokens, batch=self.capacity, kv_max=.9))
        self.after(self.report_s, self.decode, r, life)

    def do_StartWave(self, c):
        assert c.placements and len({p.kind for p in c.placements}) == 1
        self.after(self.rng.uniform(.05, .3), self.pull, c, self.life[c.rollout])

    def pull(self, c, life):
        e = self.engines[c.rollout]
        if life != self.life[c.rollout] or c.wave < e.wave: return
        if c.version not in self.within(self.host_of[c.rollout]) or ('pull' in self.faults and self.t < self.calm_at and self.rng.random() < .1):
            return self.feed(ev.PullFailed(c.rollout, c.wave, c.version, 'gone'))
        for t, (p, _) in e.flows.items(): # a new wave ends what the old one left; nobody may be waiting for it
            assert t not in self.manager.ledger.rows or self.manager.ledger.rows[t].lease > p.lease or not self.manager.outcomes.runs(t, p.lease), p
        e.flows.clear()
        e.wave, e.version = c.wave, c.version
        self.feed(ev.WaveStarted(c.rollout, c.wave, c.version, .1))
        self.seat(e, c)

    def do_Continue(self, c): self.after(self.rng.uniform(.01, .4), self.more, c, self.life[c.rollout])

    def more(self, c, life):
        e = self.engines[c.rollout]
        if life != self.life[c.rollout]: return
        if e.wave != c.wave: return self.after(.1, self.more, c, life) # its pull is not over
        self.seat(e, c)

    def seat(self, e, c):
        for p in c.placements:
            had = self.tokens.get(p.trajectory, (0, 0, ()))
            if self.manager.outcomes.runs(p.trajectory, p.lease):
                assert p.first <= had[1], f'{p} goes on after tokens that the pool does not have: {had}'
                if p.first and not self.manager.dispatch.schedule.mixes: assert set(had[2]) == {c.version}, f'{p}: tokens of {had[2]}, now {c.version}'
            if p.trajectory in e.cut.get(c.wave, ()): self.say(e.id, self.life[e.id], p, p.first, 'abort', c.version)
            elif self.rng.random() < self.refuse: self.after(.01, self.feed, ev.Refused(c.rollout, p.trajectory, p.lease, 'too long'))
            else: e.flows[p.trajectory] = [p, p.first]

    def length(self, t):
        "How long an answer will be, wherever it is generated"
        return 1 + int(random.Random(t).lognormvariate(0, 1) * self.tail * 20)

    def decode(self, r, life):
        "A report's worth of decoding"
        if self.life[r] != life: return
        e = self.engines[r]
        for t, (p, n) in list(e.flows.items()):
            n = min(self.length(t), n + (self.rng.randrange(2, 16) if r not in self.pace else round(2 * self.pace[r] * self.capacity * 7 / (self.capacity + len(e.flows)))))
            e.flows[t][1] = n
            if last := n == self.length(t): del e.flows[t]
            self.say(r, life, p, n, 'stop' if last else None, e.version)
        self.after(self.report_s, self.decode, r, life)

    def say(self, r, life, p, n, finish, version):
        for _ in range(1 + (self.rng.random() < .2)): self.after(self.rng.choice((0, 0, .1, .3)), self.report, r, life, p, n, finish, version)

    def report(self, r, life, p, n, finish, version):
        if life != self.life[r] and self.rng.random() < .5: return # it really died
        if not self.manager.accepts(r, p.trajectory, p.lease): return
        lease, had, versions = self.tokens.get(p.trajectory, (0, 0, ()))
        if lease < p.lease: # a new placement: what the pool has beyond its first token is void
            assert had >= p.first
            lease, had, versions = p.lease, p.first, versions if p.first else ()
        if n > had or not versions: had, versions = max(n, had), tuple(dict.fromkeys((*versions, version)))
        self.tokens[p.trajectory] = lease, had, versions
        e, used = self.engines[r], self.engines[r].used()
        self.feed(ev.Progress(r, [p.trajectory], [p.lease], [had], [finish], used / self.kv_tokens, len(e.flows), 0, used, 20. * len(e.flows)))

    def do_Abort(self, c): self.after(self.rng.choice((.02, .2, 1., 8.)), self.cut, c, self.life[c.rollout])

    def cut(self, c, life):
        if life != self.life[c.rollout]: return
        e = self.engines[c.rollout]
        e.cut.setdefault(e.wave, set()).update(c.trajectories) # such as have not begun
        for t in [t for t in e.flows if not c.trajectories or t in c.trajectories]:
            p, n = e.flows.pop(t)
            self.say(c.rollout, life, p, n, 'abort', e.version)

    def do_Switch(self, c): self.after(self.rng.uniform(.05, .3), self.switch, c, self.life[c.rollout])

    def switch(self, c, life):
        e = self.engines[c.rollout]
        if life != self.life[c.rollout] or e.wave != c.wave: return
        if c.version not in self.within(self.host_of[c.rollout]):
            e.flows.clear()
            return self.feed(ev.PullFailed(c.rollout, c.wave, c.version, 'gone'))
        e.version = c.version
        self.feed(ev.Switched(c.rollout, c.wave, c.version, .1))

    def do_Suspend(self, c): pass # until its next wave
    def do_Tell(self, c): self.told.append(c.event)
    def do_Raise(self, c):
        self.life.setdefault(c.rollout, 0)
        self.host_of[c.rollout] = c.rollout % self.hosts
        self.after(1., self.join, c.rollout, self.life[c.rollout])
    def do_Retire(self, c): self.life[c.rollout] += 1

    def do_Forget(self, c):
        for t in c.trajectories: self.tokens.pop(t, None)

    def within(self, host):
        "What a rollout of this host can pull; where the relay is dead, from any other"
        return self.versions[host] or {v for have in self.versions.values() for v in have}

    # data
    def do_ScoreGroup(self, c): self.after(self.rng.uniform(.05, .4), self.scored, c, self.data_life)

    def scored(self, c, life):
        if life != self.data_life: return
        now = [self.tokens.get(t, (0, 0))[0] for t in c.trajectories]
        bad = {t: 'reward_error' for t in c.trajectories if self.rng.random() < self.unscorable}
        same = random.Random(c.group).random() < self.uniform
        good = {t: float(c.group % 2 if same else t % 2) for t in c.trajectories if t not in bad}
        if self.manager.ledger.groups.get(c.group) is not None and self.manager.ledger.groups[c.group].state == 'closed':
            assert now == c.leases, f'group {c.group} is scored on other tokens than were meant: {now} {c.leases}'
            assert all(self.tokens[t][1] == self.length(t) for t in c.trajectories), 'an answer is scored that is not whole'
        for _ in range(1 + (self.rng.random() < .1)):
            self.feed(ev.GroupScored(c.group, good, bad, {t: 20 for t in good}, '', dict(zip(c.trajectories, c.leases))))

    # weights
    def issue(self, step, incarnation):
        version = self.manager.issue_version(step, incarnation)
        self.after(0, self.commit)
        return version

    def publish(self, step, incarnation):
        version = self.issue(step, incarnation)
        for h in range(self.hosts): self.after(self.rng.uniform(.05, .5), self.arrive, h, version, step, incarnation)
        return version

    def arrive(self, h, version, step, incarnation):
        keep = sorted({*self.versions[h], version})
        self.versions[h][version] = step, incarnation
        for v in keep[:-self.keep]:
            if v not in self.pins: self.versions[h].pop(v, None)
        if version in self.versions[h]: self.feed(ev.VersionReady(h, version, step, incarnation, f'c{version}'))

    def do_Pin(self, c): self.pins.add(c.version)
    def do_Unpin(self, c): self.pins.discard(c.version)

    # actor
    def actor_up(self, step):
        self.incarnation = self.manager.ledger.incarnation + 1
        self.actor_at, self.busy = step, False
        for s in [s for s in self.lineage if s > step]: del self.lineage[s]
        self.feed(ev.ActorJoined(self.incarnation, step))
        self.publish(step, self.incarnation)
        self.after(.1, self.ask, self.incarnation)

    def ask(self, incarnation):
        if incarnation == self.incarnation and not self.busy: self.feed(ev.BatchAsked(incarnation, self.actor_at + 1))

    def do_GiveEarly(self, c):
        assert self.manager.dispatch.schedule.early and c.groups
        self.early.setdefault((c.incarnation, c.step), set()).update(c.groups)

    def do_GiveBatch(self, c):
        if c.incarnation != self.incarnation or self.busy: return
        self.forecast.append(self.early.get((c.incarnation, c.step), set()) <= set(c.groups))
        assert c.step == self.actor_at + 1
        kept = [r for (t, *_), r in self.journal.rows.items() if t.__name__ == 'GroupRow' and r.id in c.groups]
        assert all(r.state in ('sampled', 'trained') and r.step == c.step for r in kept), 'given out before it was written down'
        self.busy = True
        self.after(self.rng.uniform(.5, 1.5), self.trained, c, self.issue(c.step, c.incarnation))

    def trained(self, c, version):
        if c.incarnation == self.incarnation:
            self.actor_at, self.busy = c.step, False
            self.lineage[c.step] = c.groups
            for h in range(self.hosts): self.after(self.rng.uniform(0, .5), self.arrive, h, version, c.step, c.incarnation)
        elif self.rng.random() < .5: return
        self.feed(ev.StepTrained(c.incarnation, c.step, version)) # perhaps of an actor that is taken for dead
        every = self.cfg.checkpoint_every
        if c.incarnation == self.incarnation and (c.step == self.cfg.steps or every and c.step % every == 0):
            self.checkpoints = sorted({*self.checkpoints, c.step})[-self.cfg.keep_checkpoints:]
            self.feed(ev.CheckpointSaved(c.step))
        self.after(0, self.ask, self.incarnation)

    # the end
    def do_ReportEval(self, c):
        assert len(c.reward) == self.n[1] * self.cfg.eval.samples
        if (c.step, c.version) not in [(e.step, e.version) for e in self.evals]: self.evals.append(c)
    def do_EndRun(self, c): self.ended = c

    # faults
    def fault(self, kind):
        if self.t < self.calm_at:
            getattr(self, f'fault_{kind}')()
            self.after(self.rng.expovariate(1 / self.fault_every), self.fault, kind)

    def fault_rollout(self):
        r = self.rng.choice(list(self.life))
        self.life[r] += 1
        self.feed(ev.RolloutLost(r, 'killed'))
        self.after(self.rng.uniform(.5, 3), self.join, r, self.life[r])

    def fault_scale(self): self.feed(ev.ScaleAsked(self.rng.randrange(1, 7)))
    def fault_drain(self): self.feed(ev.DrainAsked(self.rng.choice(list(self.life))))
    def fault_pause_now(self):
        self.feed(ev.Paused(now=True))
        self.after(self.rng.uniform(.5, 12), self.feed, ev.Resumed())

    def fault_pull(self): pass # see `pull`

    def fault_actor(self):
        old, self.incarnation = self.incarnation, -1
        if old < 1: self.incarnation = old; return
        self.feed(ev.ActorLost(old, 'killed'))
        self.checkpoints = [s for s in self.checkpoints if s == 0 or self.rng.random() < .8] or self.checkpoints # some cannot be read
        if self.checkpoints and self.checkpoints[-1] < self.manager.ledger.horizon: self.checkpoints.append(self.manager.ledger.horizon)
        if not self.checkpoints: self.checkpoints = [self.manager.ledger.horizon]
        self.checkpoints.sort()
        self.after(self.rng.uniform(.5, 2), self.revive, self.checkpoints[-1])

    def revive(self, step):
        if self.incarnation == -1: self.actor_up(step)

    def fault_data(self):
        self.data_life += 1
        self.tokens.clear()
        self.feed(ev.DataLost())

    def fault_relay(self):
        h = self.rng.randrange(self.hosts)
        had, self.versions[h] = self.versions[h], {}
        self.feed(ev.RelayLost(h, 'killed'))
        for v, (step, inc) in had.items():
            if v == max(had) or self.rng.random() < .5: self.after(self.rng.uniform(.2, 2), self.arrive, h, v, step, inc)

    def fault_pause(self):
        self.feed(ev.Paused())
        self.after(self.rng.uniform(.5, 3), self.feed, ev.Resumed())

    def fault_eval(self): self.feed(ev.EvalAsked())

    def fault_coordinator(self):
        "It dies, with what it had not committed, and is built again from the rows; who was not answered says it again"
        again, self.uncommitted = [e for e, _ in self.uncommitted if isinstance(e, RETRIED)], []
        rows = msgspec.msgpack.decode(msgspec.msgpack.encode([(type(r).__name__, r) for r in self.journal.rows.values()]))
        types = {t.__name__: t for t in KEYS}
        self.manager = RolloutManager(self.cfg, *self.n, Ledger.restore([msgspec.convert(r, types[n]) for n, r in rows]), self.keep)
        self.feed(ev.Restarted({t: (lease, n) for t, (lease, n, _) in self.tokens.items()} if self.rng.random() < .7 else {}))
        for h, have in self.versions.items():
            for v, (step, inc) in sorted(have.items()): self.feed(ev.VersionReady(h, v, step, inc, f'c{v}'))
        for r, life in self.life.items():
            self.life[r] += 1 # they are told to abort everything
            self.after(self.rng.uniform(0, 1), self.join, r, life + 1)
        for e in again: self.after(.1, self.retry, e)
        self.after(.2, self.ask, self.incarnation)

    def retry(self, e):
        if isinstance(e, ev.Progress) and not self.manager.accepts(e.rollout, e.trajectory[0], e.lease[0]): return
        self.feed(e)
