"The ledger against a model that is too simple to be wrong; restored from its rows at any moment; and at size"
import copy, random, time
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from laminar_sdk.core.errors import IntegrityError, RunError
from laminar_sdk.core.types import STATES
from laminar_sdk.scheduling.books import NEXT, TrajectoryRow
from laminar_sdk.scheduling.books import KEYS
from laminar_sdk.scheduling.ledger import Ledger


def into(journal: dict, rows):
    "What the SQLite journal does: the newest row of each key"
    for r in rows: journal[type(r), getattr(r, KEYS[type(r)][0])] = r


def same(a: Ledger, b: Ledger):
    for name in 'meta rows groups members steps batches versions published tally'.split(): assert getattr(a, name) == getattr(b, name), name
    assert a.waiting.keys() == b.waiting.keys() and all(set(a.waiting[k]) == set(b.waiting[k]) for k in a.waiting) and set(a.buffer) == set(b.buffer)


class LedgerMachine(RuleBasedStateMachine):
    "The model: each trajectory's state, each step's groups on the surviving lineage"

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep):
        self.ledger, self.journal, self.keep = Ledger(keep), {}, keep
        self.ledger.publish(0, 0, 0)
        self.state, self.members, self.lineage, self.trained, self.saved = {}, {}, {}, 0, [0]

    def pick(self, data, *states):
        ids = [t for t in self.ledger.rows if self.state[t] in states]
        return data.draw(st.sampled_from(ids)) if ids else None

    def group(self, data, state):
        ids = [g.id for g in self.ledger.groups.values() if g.state == state and g.kind == 'train']
        return data.draw(st.sampled_from(ids)) if ids else None

    @rule(prompt=st.integers(0, 9), n=st.integers(1, 3), kind=st.sampled_from(['train', 'train', 'eval']))
    def admit(self, prompt, n, kind):
        g = self.ledger.admit(prompt, n, kind)
        self.members[g] = list(self.ledger.members[g])
        assert len(self.members[g]) == n and not set(self.members[g]) & set(self.state)
        self.state |= dict.fromkeys(self.members[g], 'pending')

    @rule(data=st.data(), rollout=st.integers(0, 3))
    def place(self, data, rollout):
        if (t := self.pick(data, 'pending')) is None: return
        old = self.ledger.rows[t].lease
        lease = self.ledger.place(t, rollout, max(0, self.ledger.newest))
        assert lease == old + 1 and self.ledger.accepts(t, lease) and not self.ledger.accepts(t, old)
        self.state[t] = 'running'

    @rule(data=st.data())
    def lose(self, data):
        if (t := self.pick(data, 'running')) is None or self.ledger.groups[self.ledger.rows[t].group].state == 'closed': return
        lease = self.ledger.rows[t].lease
        self.ledger.lose(t, died=True)
        assert not self.ledger.accepts(t, lease)
        self.state[t] = 'pending'

    @rule(data=st.data(), fine=st.booleans())
    def end(self, data, fine):
        if (t := self.pick(data, 'running')) is None or self.ledger.rows[t].finish is not None: return
        if fine: self.ledger.finish(t, 'stop', 3)
        else:
            self.ledger.fail(t, 'refused')
            self.state[t] = 'failed'
        g = self.ledger.rows[t].group
        if all(self.state[m] == 'failed' for m in self.members[g]): self.ledger.fail_group(g, 'all failed')

    @rule(data=st.data(), kind=st.sampled_from(['score', 'reopen']))
    def settle(self, data, kind):
        groups = [g for g in self.ledger.groups if self.ledger.groups[g].state == 'open' and self.ledger.ended(g)]
        if not groups: return
        g = data.draw(st.sampled_from(groups))
        ids = self.ledger.close(g)
        for t in ids:
            if kind == 'reopen': continue
            self.ledger.score(t, 1., 3)
            self.state[t] = 'scored' if self.ledger.groups[g].kind == 'eval' else 'buffered'
        if kind == 'score': self.ledger.complete(g)
        else: self.ledger.reopen(g)

    @rule(data=st.data(), state=st.sampled_from(['filtered', 'dropped']))
    def leave(self, data, state):
        if (g := self.group(data, 'buffered')) is None: return
        for t in self.ledger.living(g): self.state[t] = state
        self.ledger.leave(g, state, 'policy')

    @rule(n=st.integers(1, 2))
    def sample(self, n):
        groups, step = self.ledger.oldest_buffered(n), self.trained + 1
        if len(groups) < n or step in self.lineage: return
        self.ledger.sample(step, self.ledger.incarnation, groups)
        self.lineage[step] = groups
        for g in groups: self._set(g, 'sampled')

    def _set(self, g, state):
        for t in self.members[g]:
            if self.state[t] != 'failed': self.state[t] = state

    @precondition(lambda self: self.trained + 1 in self.lineage)
    @rule()
    def train(self):
        self.trained += 1
        v = self.ledger.issue_version(self.trained, self.ledger.incarnation)
        self.ledger.publish(v, self.trained, self.ledger.incarnation, f'c{v}')
        self.ledger.train(self.trained, v)
        for g in self.lineage[self.trained]: self._set(g, 'trained')

    @rule()
    def checkpoint(self):
        self.saved = sorted({*self.saved, self.trained})[-self.keep:]
        gone = self.ledger.checkpoint(self.trained)
        final = [t for s, gs in self.lineage.items() if s <= self.saved[0] for g in gs for t in self.members[g]]
        assert set(gone) <= set(final) and not set(final) & set(self.ledger.rows) # only what lies behind the oldest kept one may be deleted

    @rule(data=st.data())
    def rollback(self, data):
        step = data.draw(st.integers(self.saved[0], max(self.lineage, default=self.trained)))
        if step < self.saved[0]: return
        for s in [s for s in self.lineage if s > step]:
            for g in self.lineage.pop(s): self._set(g, 'buffered')
        for s, gs in self.lineage.items():
            for g in gs: self._set(g, 'trained')
        self.ledger.rollback(step, self.ledger.incarnation + 1)
        self.trained, self.saved = step, [s for s in self.saved if s <= step]

    @rule()
    def crash(self):
        into(self.journal, self.ledger.drain())
        again = Ledger.restore(self.journal.values(), self.keep)
        if not any(s <= min(self.saved) for s in self.ledger.steps) and len(again.versions) == len(self.ledger.versions): same(again, self.ledger)
        self.ledger = again

    @rule()
    def commit(self): into(self.journal, self.ledger.drain())

    @rule(data=st.data(), to=st.sampled_from(STATES))
    def illegal(self, data, to):
        "A move that the table does not show is refused, and leaves everything as it was"
        if not self.ledger.rows: return
        row = self.ledger.rows[data.draw(st.sampled_from(list(self.ledger.rows)))]
        if to in NEXT[TrajectoryRow].get(row.state, ()): return
        before, counts = copy.copy(row), self.ledger.counts()
        with pytest.raises(RunError): self.ledger.move(row, to)
        assert row == before and self.ledger.counts() == counts

    @invariant()
    def agrees(self):
        if not hasattr(self, 'ledger'): return
        assert self.ledger.audit() == []
        assert {t: r.state for t, r in self.ledger.rows.items()} == {t: s for t, s in self.state.items() if t in self.ledger.rows}
        total = sum(sum(self.ledger.counts(k).values()) for k in ('train', 'eval'))
        assert total == len(self.state)
        for s in STATES: assert sum(self.ledger.counts(k)[s] for k in ('train', 'eval')) == sum(x == s for x in self.state.values()), s
        used = [g for gs in self.lineage.values() for g in gs]
        assert len(used) == len(set(used)) # no group in two surviving steps


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=50)


def step_of(ledger, n=4, size=2, step=None):
    "n groups from admission to trained"
    step = step or ledger.trained_step + 1
    for _ in range(n):
        g = ledger.admit(0, size)
        for t in ledger.members[g]:
            ledger.place(t, 0, max(0, ledger.newest))
            ledger.finish(t, 'stop', 5)
        for t in ledger.close(g): ledger.score(t, 1., 5)
        ledger.complete(g)
    ledger.sample(step, ledger.incarnation, ledger.oldest_buffered(n))
    v = ledger.issue_version(step, ledger.incarnation)
    ledger.publish(v, step, ledger.incarnation)
    ledger.train(step, v)


@pytest.mark.parametrize('change', [
    lambda b: setattr(b.rows[1], 'state', 'pending'),
    lambda b: setattr(b.rows[1], 'step', 2),
    lambda b: setattr(b.rows[1], 'reward', None),
    lambda b: setattr(b.rows[1], 'version', 99),
    lambda b: setattr(b.groups[1], 'state', 'buffered'),
    lambda b: setattr(b.groups[3], 'step', 1),
    lambda b: b.rows.pop(1) and b.members[1].remove(1),
    lambda b: b.batches[1].append(2),
    lambda b: b.batches[2].clear(),
    lambda b: b.steps.pop(1) and b.batches.pop(1),
    lambda b: b.meta.update(trained_step=1),
    lambda b: b.meta.update(trajectories=9),
    lambda b: b.tally[TrajectoryRow]['train'].update(trained=1),
    lambda b: b.tally[TrajectoryRow]['eval'].update(scored=1),
    lambda b: b.waiting['train'].update({1: None}),
    lambda b: b.buffer.update({1: None}),
    lambda b: setattr(b.versions[1], 'incarnation', -1)])
def test_the_audit_sees_what_is_wrong(change):
    ledger = Ledger()
    ledger.publish(0, 0, 0)
    for _ in range(2): step_of(ledger, n=2)
    assert ledger.audit() == []
    change(ledger)
    assert ledger.audit()


def test_an_unreadable_checkpoint_goes_back_further_but_not_behind_the_oldest():
    ledger = Ledger(keep_checkpoints=2)
    for s in range(1, 7):
        step_of(ledger)
        if s % 2 == 0: ledger.checkpoint(s)
    assert ledger.checkpoints == [4, 6] and ledger.counts()['trained'] == 48
    back = ledger.rollback(4, 1) # 6 could not be read
    assert len(back) == 8 and ledger.checkpoints == [4] and ledger.counts()['buffered'] == 16 and ledger.audit() == []
    with pytest.raises(RunError, match='steps 4 to 4'): ledger.rollback(2, 2)


def test_a_version_number_is_never_used_twice():
    ledger, journal = Ledger(), {}
    first = [ledger.issue_version(0, 1) for _ in range(3)]
    into(journal, ledger.drain())
    assert Ledger.restore(journal.values()).issue_version(0, 2) == max(first) + 1
    with pytest.raises(IntegrityError): ledger.publish(first[0], step=4, incarnation=2)


def test_an_old_checkpoint_message_does_not_move_the_horizon_back():
    ledger = Ledger(keep_checkpoints=3)
    for s in range(1, 5):
        step_of(ledger)
        ledger.checkpoint(s)
    ledger.rollback(2, 1) # 3 and 4 could not be read
    assert ledger.checkpoint(1) == [] and ledger.checkpoints == [2] and ledger.audit() == []


def test_what_is_final_costs_no_memory_and_no_time(figures):
    ledger, took, n = Ledger(keep_checkpoints=2), [], 0
    for s in range(1, 801):
        t = time.process_time()
        step_of(ledger, n=8, size=8)
        if s % 10 == 0: ledger.checkpoint(s)
        ledger.drain()
        took.append(time.process_time() - t)
        n = max(n, len(ledger.rows))
    assert n <= 31 * 64 and len(ledger.versions) <= 100 and len(ledger.published) <= 100 # 51,200 trajectories have passed
    early, late = sorted(took[50:200])[75], sorted(took[-150:])[75]
    assert late < 2 * early, f'a step of 64 trajectories took {early:.4f} s at first and {late:.4f} s at last'
    figures['us_per_trajectory'] = late / 64 * 1e6


@pytest.mark.long
def test_a_million_trajectories(figures):
    ledger, journal = Ledger(), {}
    began = time.process_time()
    for s in range(1, 1001):
        step_of(ledger, n=125, size=8)
        if s % 20 == 0: ledger.checkpoint(s)
        into(journal, ledger.drain())
    figures['cpu_seconds_for_a_million'] = time.process_time() - began
    began = time.process_time()
    again = Ledger.restore(journal.values())
    figures['cpu_seconds_to_restore'] = time.process_time() - began
    assert again.counts() == ledger.counts() and again.counts()['trained'] == 1_000_000 and again.audit() == []
    assert figures['cpu_seconds_to_restore'] < 10


def test_rows_come_once_and_as_they_are_now():
    ledger = Ledger()
    ledger.admit(0, 1)
    ledger.place(1, 0, 0)
    rows = [r for r in ledger.drain() if isinstance(r, TrajectoryRow)]
    assert len(rows) == 1 and rows[0].state == 'running'
    ledger.finish(1, 'stop', 3)
    assert rows[0].finish is None # a copy: the journal writes it while the ledger goes on


def test_a_shuffled_file_restores_the_same():
    ledger = Ledger()
    for _ in range(3): step_of(ledger)
    ledger.checkpoint(2)
    rows = ledger.drain()
    random.Random(0).shuffle(rows)
    same(Ledger.restore(rows), ledger)
