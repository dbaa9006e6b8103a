"""The rollouts of a run, steered and killed while it works: schedules, repack, more and fewer of them. Emulated engines, all else is real."""
import os, signal

import numpy as np
import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import Repack, Sampling
from laminar_sdk.core.errors import ConfigError, MissingError
from test_run import finish, model, notices, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]


def rows(seen): return [r.event.metrics for r in seen if isinstance(r.event, ev.StepDone)]


@pytest.mark.parametrize('schedule', [
    pytest.param('sync', marks=pytest.mark.long), 'inflight', pytest.param('one_step', marks=pytest.mark.long), pytest.param('stream', marks=pytest.mark.long), pytest.param('partial', marks=pytest.mark.long)])
def test_schedules(cluster, model, tmp_path, schedule):
    "Each runs to its end within its own bound on staleness; where versions mix, the tokens say which they are of. `sync` also runs in `test_run_same`"
    run = start(cluster, model, tmp_path, schedule, schedule=schedule, steps=6, n=4, colocated=schedule == 'sync', engine=dict(step_s=.02))
    s, counts, seen = finish(run)
    assert counts['train']['trained'] == 6 * 4 * 2 and len(rows(seen)) == 6
    assert s['emulated'] and all(r['emulated'] for r in rows(seen)) and any('EMULATED' in t for t in notices(seen)), 'it says so everywhere'
    worst = max(r['staleness_max'] for r in rows(seen))
    assert worst <= dict(sync=0, one_step=1, stream=1).get(schedule, 99)
    assert (sum(r.get('begun_groups', 0) for r in rows(seen)) > 0) == (schedule == 'stream')
    answers = run.trajectories(100)
    mixed = [v for v in answers['versions'] if len(v) > 1]
    if schedule in ('partial', 'inflight'):
        assert mixed and all(x['version'] < y['version'] and x['first'] < y['first'] for v in mixed for x, y in zip(v, v[1:]))
    else: assert not mixed


@pytest.mark.long
def test_stream_begins_with_what_is_complete(cluster, model, tmp_path):
    "Groups are in the gradients before their batch is complete; the death of the actor and of the coordinator in between loses nothing and trains nothing twice"
    run = start(cluster, model, tmp_path, 'streamed', schedule='stream', steps=12, n=6, engine=dict(step_s=.02), sampling=Sampling(max_tokens=50))
    os.kill(running(run, 3)['children']['actor/0']['pid'], signal.SIGKILL)
    until(lambda: any('life number 2' in t for t in notices(run.events(max_items=10_000))))
    os.kill(running(run, run.status()['step'] + 2)['pid'], signal.SIGKILL)
    s, counts, seen = finish(run)
    begun = [r.get('begun_groups', 0) for r in rows(seen)]
    assert counts['train']['trained'] == 12 * 6 * 2 and all(r['updates'] == 1 for r in rows(seen))
    assert sum(begun) > 2 * len(begun) and max(begun) <= 6, begun


@pytest.mark.long
def test_stream_takes_whole_batches_where_the_algorithm_needs_them(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'whole', schedule='stream', steps=3, n=4, algorithm=dict(epochs=2))
    s, counts, seen = finish(run)
    assert [t for t in notices(seen) if 'takes its batches whole' in t] == ['the actor takes its batches whole: 2 updates a step: the weights move before the last group is read']
    assert counts['train']['trained'] == 3 * 4 * 2 and all(r['updates'] == 2 and 'begun_groups' not in r for r in rows(seen))


def test_staleness_is_bounded_by_pacing(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'paced', schedule='partial', max_staleness=1, steps=8, n=4, max_groups=16)
    s, counts, seen = finish(run)
    assert max(r['staleness_max'] for r in rows(seen)) <= 1 and counts['train']['dropped'] == 0 and counts['train']['trained'] == 64


def test_more_and_fewer_rollouts_and_nothing_is_lost(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'elastic', steps=100_000, n=4, engine=dict(step_s=.02), sampling=Sampling(max_tokens=50))
    there = lambda: set(run.status()['manager']['rollouts'])
    running(run, 1)
    run.pool.scale(3)
    until(lambda: there() == {0, 1, 2})
    run.pool.drain(0)
    until(lambda: there() == {1, 2} and 'rollout/0' not in run.status()['children'])
    with pytest.raises(MissingError, match='no rollout 0'): run.pool.kill(0)
    with pytest.raises(ConfigError, match='0 or more'): run.pool.scale(-1)
    run.pool.kill(2)
    until(lambda: any('run.pool.kill' in t for t in notices(run.events(max_items=10_000))) and there() == {1, 2})
    run.pool.scale(0)
    until(lambda: there() == set())
    step = run.status()['step']
    run.pool.scale(2)
    running(run, step + 3)
    os.kill(run.status()['pid'], signal.SIGKILL) # the coordinator comes back to the rollouts that are wanted
    until(lambda: len(there()) == 2)
    running(run, run.status()['step'] + 2)
    run.pause(now=True)
    until(lambda: (m := run.status()['manager'])['paused'] and not any(r['running'] for r in m['rollouts'].values()))
    assert run.status()['manager']['counts']['train']['pending'] > 0
    run.resume()
    running(run, run.status()['step'] + 2)
    run.stop()
    assert run.audit() == [] and run.counts()['train']['failed'] == run.counts()['train']['dropped'] == 0


def test_a_pool_of_two_kinds_each_scaled_by_itself(cluster, model, tmp_path):
    "Two small slow engines and one large fast one: each measures its own B, the fast one does most of the work, and each kind grows, shrinks to nothing and comes back"
    from laminar_sdk.rollout_pool import Replicas
    kinds = [Replicas(2, name='small', max_running=4, step_s=.04, kv_tokens=400), Replicas(1, name='large', max_running=16, step_s=.01, kv_tokens=5000)]
    run = start(cluster, model, tmp_path, 'mixed', steps=100_000, n=8, replicas=kinds, repack=Repack(every=.3))
    there = lambda: {i: r['batch'] for i, r in run.status()['manager']['rollouts'].items()}
    running(run, 4)
    until(lambda: there() == {0: 4, 1: 16, 2: 4})
    with pytest.raises(ConfigError, match="kinds of this pool are \\['small', 'large'\\]"): run.pool.scale(1)
    run.pool.scale(0, kind='small')
    until(lambda: there() == {1: 16})
    run.pool.scale(2, kind='large')
    until(lambda: there() == {1: 16, 3: 16})
    run.pool.scale(0, kind='large')
    run.pool.scale(3, kind='small')
    until(lambda: there() == {0: 4, 2: 4, 4: 4})
    step = run.status()['step']
    run.pool.scale(1, kind='large')
    os.kill(run.status()['pid'], signal.SIGKILL) # the coordinator comes back to the same kinds
    until(lambda: there() == {0: 4, 1: 16, 2: 4, 4: 4}, 60)
    running(run, step + 3)
    run.stop()
    assert run.audit() == [] and run.counts()['train']['failed'] == run.counts()['train']['dropped'] == 0


def test_tails_are_packed_and_what_moved_is_whole(cluster, model, tmp_path):
    "Moves between real workers; an answer that moved has the tokens that the engine would have given without the move"
    run = start(cluster, model, tmp_path, 'packed', steps=12, n=8, group=4, replicas=3, engine=dict(step_s=.03), sampling=Sampling(max_tokens=55),
                repack=Repack(every=.2))
    s, counts, seen = finish(run)
    plans, done = ([r.event for r in seen if isinstance(r.event, t)] for t in (ev.Repacked, ev.RepackDone))
    assert len(plans) == len(done) > 1 and sum(e.moved for e in done) > 3
    answers = [a for a in run.trajectories(1000) if a['moves']]
    assert len(answers) >= 3 and all(len(a['versions']) == 1 for a in answers)
    assert expected(model, answers) == [a['response_ids'] for a in answers]


def expected(model, answers):
    "What one engine, asked for the whole answer at once, says"
    import asyncio
    from laminar_sdk.rollout.engine import GenerationRequest, trajectory_seed
    from laminar_sdk.rollout_shell import make_engine
    async def go():
        engine = make_engine(dict(kind='emulated', max_num_seqs=8, step_s=0.), model, 64, 0)
        await engine.start()
        out = []
        for a in answers:
            request = GenerationRequest(str(a['id']), np.array(a['prompt_ids'], np.int32), 55, seed=trajectory_seed(0, a['id']))
            out.append(np.concatenate([c.ids async for c in engine.generate(request)]).tolist())
        await engine.stop()
        return out
    return asyncio.run(go())
