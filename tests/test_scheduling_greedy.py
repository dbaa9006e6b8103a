"Groups with a greedy answer: who counts, what is dropped, and that they come to their end under every schedule and fault"
from collections import Counter
import pytest
from hypothesis import given, settings, strategies as st
from laminar_sdk.core.config import Buffer, Curriculum, Eval, Mixture, ReMax, Sampling, sampling_of
from laminar_sdk.core.types import GREEDY
from laminar_sdk.scheduling.books import GroupRow, TrajectoryRow
from laminar_sdk.scheduling.cursor import PromptCursor
from laminar_sdk.scheduling.greedy import members, samples, unpaired
from laminar_sdk.scheduling.intake import Intake
from laminar_sdk.scheduling.ledger import Ledger
from scheduling_world import World, config

SCHEDULES = ('laminar', 'sync', 'one_step', 'stream', 'partial', 'inflight')
FAULTS = ('rollout', 'pull', 'actor', 'data', 'relay', 'pause', 'eval', 'coordinator', 'scale', 'drain', 'pause_now')

def of(world, kind): return [r for r in world.journal.rows.values() if isinstance(r, kind) and r.kind == 'train']


# ---- the deciding part ---------------------------------------------------------------------------------------------

@given(n=st.integers(1, 8), failed=st.sets(st.integers(0, 8)))
def test_a_group_is_of_use_exactly_if_it_can_be_compared(n, failed):
    all_ = members(n, greedy=True)
    assert len(all_) == n + 1 == len(set(all_)) and all_[-1] == GREEDY and all_[:-1] == members(n, greedy=False)
    living = [m for i, m in enumerate(all_) if i not in failed]
    assert (unpaired(living) == '') == (GREEDY in living and any(m != GREEDY for m in living))
    assert unpaired(reversed(living)) == unpaired(living)
    rows = [TrajectoryRow(i, 1, 0, m) for i, m in enumerate(living)]
    assert [r.sample_index for r in samples(rows)] == [m for m in living if m >= 0] and samples(samples(rows)) == samples(rows)


@given(temperature=st.floats(.1, 5), index=st.integers(-1, 20))
def test_only_the_greedy_one_is_drawn_otherwise(temperature, index):
    s = Sampling(temperature=temperature, max_tokens=7, stop_token_ids=(3,))
    got = sampling_of(s, index)
    assert got.temperature == (0 if index == GREEDY else temperature) and got.model_copy(update=dict(temperature=temperature)) == s


@settings(max_examples=200)
@given(n=st.integers(1, 4), rewards=st.lists(st.sampled_from([0., 1., None]), min_size=5, max_size=5), dynamic=st.booleans(), groups=st.sampled_from(['partial', 'complete']))
def test_what_becomes_of_a_group(n, rewards, dynamic, groups):
    "Dropped, set aside, or taken: by the rewards of its members, the greedy one's the last"
    rewards = rewards[:n + 1]
    cfg = config(prompts_per_step=2, algorithm=ReMax(group_size=n, dynamic_sampling=dynamic), buffer=Buffer(groups=groups))
    class Cursor(PromptCursor):
        def saw(self, prompt, rewards): said.append(rewards); return False
    said, ledger = [], Ledger()
    intake = Intake(cfg, ledger, Cursor(9))
    ledger.publish(0, 0, 1)
    g = ledger.admit(0, n, greedy=True)
    ids = ledger.members[g]
    for t, r in zip(ids, rewards):
        ledger.place(t, 0, 0)
        if r is None: ledger.fail(t, 'reward_error')
        else: ledger.finish(t, 'stop', 5)
    lacks, there = intake.lacks(g), [r for r in rewards if r is not None]
    assert bool(lacks) == (len(there) <= n if groups == 'complete' else rewards[-1] is None or len(there) == 1)
    if lacks: return
    ledger.close(g)
    for t, r in zip(ids, rewards):
        if r is not None: ledger.score(t, r, 5)
    intake.take(g)
    advantages = [r - rewards[-1] for r in rewards[:-1] if r is not None]
    assert said == [[r for r in rewards[:-1] if r is not None]], 'a pass rate is about what was sampled'
    assert ledger.count_groups('train', 'filtered') == (dynamic and not any(advantages)) and ledger.audit() == []


def test_staleness_and_figures_of_a_batch_are_those_of_the_samples():
    from laminar_sdk.scheduling.batches import Batches
    from laminar_sdk.scheduling.evaluation import Evaluations
    from laminar_sdk.scheduling.fleet import Fleet
    ledger = Ledger()
    batches = Batches(config(prompts_per_step=1, algorithm=ReMax(group_size=2)), ledger, Evaluations(ledger, Fleet(), 0, 0, 2))
    for v in range(4): ledger.publish(v, v, 1)
    g = ledger.admit(0, 2, greedy=True)
    for t, v in zip(ledger.members[g], (2, 3, 0)): ledger.place(t, 0, v); ledger.finish(t, 'stop', 10*t) # the greedy one is old
    ledger.close(g)
    for t in ledger.members[g]: ledger.score(t, float(t), 10*t)
    ledger.complete(g)
    row = ledger.sample(1, 0, [g])
    assert (row.staleness_mean, row.staleness_max) == (.5, 1)
    f = batches.figures(1)
    assert (f['lengths'], f['rewards'], f['staleness']) == ([10, 20], [1., 2.], [1, 0])
    ledger.train(1, 4)
    assert ledger.counts()['trained'] == 3, 'it is consumed with its group'


# ---- in the small world --------------------------------------------------------------------------------------------

def came_to_its_end(world, n):
    cfg, groups = world.cfg, of(world, GroupRow)
    assert world.ended.state == 'done', world.ended
    trained = [g for gs in world.lineage.values() for g in gs]
    assert sorted(world.lineage) == list(range(1, cfg.steps + 1)) and len(set(trained)) == len(trained) == cfg.steps*cfg.prompts_per_step
    assert {g.id for g in groups if g.state == 'trained'} == set(trained) and {g.size for g in groups} == {n + 1}
    rows = {}
    for r in of(world, TrajectoryRow): rows.setdefault(r.group, []).append(r)
    for g in groups:
        its = sorted(rows[g.id], key=lambda r: r.id)
        assert [r.sample_index for r in its] == members(n, True)
        if g.state == 'trained': assert not unpaired([r.sample_index for r in its if r.state == 'trained'])
    again, ledger = Ledger.restore(world.journal.rows.values()), world.manager.ledger
    assert again.audit() == ledger.audit() == [] and again.counts() == ledger.counts()
    return groups


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('n', [1, 3])
def test_every_schedule(schedule, n):
    world = World(config(algorithm=ReMax(group_size=n), schedule=schedule), seed=n, repack_every=.5).run()
    assert {g.state for g in came_to_its_end(world, n)} == {'trained'} and world.manager.ledger.counts()['trained'] == 6*4*(n + 1)


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_every_fault(schedule):
    "Rollouts, actor, data, coordinator die with half groups; answers are refused or cannot be scored; a group that cannot be compared is replaced"
    world = World(config(algorithm=ReMax(group_size=2, dynamic_sampling=True, refill_most=2), schedule=schedule, eval=Eval(every=2), mixture=Mixture(curriculum=Curriculum(window=3))),
                  n_prompts=dict(a=6, b=4), n_eval=4, seed=2, faults=FAULTS, fault_every=4., refuse=.06, unscorable=.06, uniform=.3, calm_at=45., repack_every=.5).run()
    groups = came_to_its_end(world, 2)
    why = Counter(g.reason.split(':')[0] for g in groups if g.state == 'dropped')
    assert why['the greedy answer failed'] and set(why) <= {'the greedy answer failed', 'every sample failed'}, why
