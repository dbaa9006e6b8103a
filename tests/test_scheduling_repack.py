"Plans keep every promise for any fleet, and nobody is emptied for whom there is no work"
import pytest
from hypothesis import given, settings, strategies as st

from laminar_sdk.core.config import GRPO, Repack, RunConfig
from laminar_sdk.core.events import Repacked
from laminar_sdk.scheduling.commands import Abort, Tell
from laminar_sdk.scheduling.dispatch import Dispatch
from laminar_sdk.scheduling.evaluation import Evaluations
from laminar_sdk.scheduling.fleet import Fleet, Rollout
from laminar_sdk.scheduling.ledger import Ledger
from laminar_sdk.scheduling.moves import Moves
from laminar_sdk.scheduling.repack import Look, Shift, broken, idle, plan
from laminar_sdk.scheduling.roofline import Roofline, kv_knee


@st.composite
def fleets(draw):
    sizes, versions, out = draw(st.lists(st.sampled_from((500., 900., 2000.)), min_size=1, max_size=3)), draw(st.integers(1, 4)), []
    for i in range(draw(st.integers(0, 24))):
        kv = draw(st.floats(0, 1))
        room = draw(st.sampled_from(sizes))
        out.append(Look(i, draw(st.integers(0, versions - 1)), draw(st.integers(0, 40)), draw(st.sampled_from((8, 32))), kv * room * draw(st.floats(1, 1.5)), room, kv,
                        draw(st.none() | st.floats(0, 1)), draw(st.sampled_from((.5, .9, 1.))), draw(st.sampled_from((0, 0, 0, 2))), draw(st.sampled_from((False, False, True)))))
    return out


@settings(max_examples=400, deadline=None)
@given(fleets(), st.none() | st.integers(0, 6))
def test_a_plan_keeps_its_promises(looks, most):
    moves, all_ = plan(looks, most), plan(looks)
    assert broken(looks, moves) == [] and set(moves) <= set(all_)
    assert len(moves) == (len(all_) if most is None else min(most, len(all_)))
    load = {r.rollout: r.load for r in looks}
    if moves: assert max(load[m.source] for m in moves) <= min((load[m.source] for m in all_ if m not in moves), default=float('inf')), 'the cheapest are kept'


@settings(max_examples=300, deadline=None)
@given(fleets())
def test_nobody_is_left_who_could_still_be_emptied(looks):
    "Best-Fit is greedy: after it, no idle rollout that neither gave nor received fits anywhere"
    moves = plan(looks)
    sources, dests, by = {m.source for m in moves}, {m.dest for m in moves}, {r.rollout: r for r in looks}
    for r in looks:
        if not idle(r) or r.rollout in sources | dests: continue
        for d in looks:
            if d.rollout != r.rollout and idle(d) and d.version == r.version and d.rollout not in sources:
                assert broken(looks, [*moves, Shift(r.rollout, d.rollout)]), f'{r} fits on {d}'
    for d in dests: assert all(idle(by[d]) and by[d].version == by[m.source].version for m in moves if m.dest == d)


def test_the_check_finds_what_is_broken():
    looks = [Look(i, v, 5, 8, 300., 500., .3, .5) for i, v in enumerate((0, 0, 0, 1))]
    found = ['\n'.join(broken(looks, m)) for m in ([Shift(0, 1)], [Shift(0, 3)], [Shift(0, 1), Shift(1, 2)], [Shift(0, 1), Shift(0, 2)])]
    assert 'would hold 600' in found[0] and 'would run 10' in found[0] and 'would mix' in found[1] and 'sources and destinations' in found[2] and 'moved twice' in found[3]


def pool(n=6, k=None, bound=None, steps=50, running=2):
    "Rollouts with short tails, all at version 0, two looks old"
    config = RunConfig(name='r', model='m', steps=steps, prompts_per_step=n, algorithm=GRPO(group_size=4), max_staleness=k, max_groups=bound, repack=Repack(every=1.))
    ledger, fleet = Ledger(), Fleet()
    dispatch = Dispatch(config, ledger, fleet, Evaluations(ledger, fleet, 0, 0, steps), n_prompts=50)
    moves = Moves(config, ledger, fleet, dispatch.wanted)
    ledger.publish(0, step=0, incarnation=1)
    for i in range(n):
        fleet.join(r := Rollout(i, 0, capacity=16, kv_tokens=10_000))
        ids = ledger.members[ledger.admit(prompt=i, n=4)]
        for t in ids: ledger.place(t, i, 0)
        r.wave, r.version, r.running = i + 1, 0, dict.fromkeys(ids[:running])
        for t in ids[running:]: ledger.finish(t, 'stop', 9)
    for fleet.now, kv in ((0., .2), (1., .1)):
        for r in fleet.rollouts.values(): r.kv_used, r.load, r.heard = kv + r.id / 100, 100 * (1 + r.id), True
        out = moves.tick()
    return moves, fleet, out


@pytest.mark.parametrize('bound, k, emptied', [(6, None, 0), (7, None, 1), (8, None, 2), (None, None, 5), (None, 0, 0), (None, 1, 5)])
def test_as_many_are_emptied_as_there_is_work_for(bound, k, emptied):
    "Six groups are in flight; waves are of one group"
    moves, fleet, out = pool(bound=bound, k=k)
    sources = [c.rollout for c in out if isinstance(c, Abort)]
    assert len(sources) == emptied and sources == sorted(sources), 'those with the least to read again'
    assert moves.figures()['looks_without_work'] == (not emptied)
    assert [len(c.event.source) for c in out if isinstance(c, Tell) and isinstance(c.event, Repacked)] == ([emptied] if emptied else [])


def test_who_is_free_already_takes_the_work():
    moves, fleet, _ = pool(bound=8)
    fleet.join(Rollout(7, 0, capacity=16, kv_tokens=10_000))
    assert moves.wanted() == 1
    fleet.join(Rollout(8, 0, capacity=16, kv_tokens=10_000))
    assert moves.wanted() == 0
    fleet.rollouts[8].draining = True
    assert moves.wanted() == 1, 'who is draining takes none'
    fleet.rollouts.clear()
    assert moves.wanted() == 0


def test_what_is_pending_is_work():
    moves, fleet, _ = pool(bound=6)
    assert moves.wanted() == 0
    for t in list(fleet.rollouts[0].running): fleet.drop(fleet.rollouts[0], t); moves.ledger.lose(t)
    assert moves.wanted() == 0 and len(fleet.free()) == 1, 'it is given to the rollout that is free'
    fleet.rollouts[0].draining = True
    assert moves.wanted() == 1


def test_the_end_of_a_run_empties_nobody():
    assert not [c for c in pool(steps=1, bound=99)[2] if isinstance(c, Abort)]


@pytest.mark.parametrize('model, gpu, tp', [('7B', 'H800', 1), ('32B', 'H800', 4), ('0.5B', 'A100', 1), ('72B', 'H800', 4)])
def test_the_knee_of_the_cache(model, gpu, tp):
    r = Roofline(model, gpu, tp)
    share = kv_knee(r)
    assert 0 < share <= 1 and r.step_s(1, share * r.kv_tokens) <= 2.001 * r.step_s(1, 0)
    assert share == 1 or r.step_s(1, 1.01 * share * r.kv_tokens) > 2 * r.step_s(1, 0)
    assert kv_knee(r, 1.5) <= share <= kv_knee(r, 4.)
