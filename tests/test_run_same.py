"""The same config in `sync` gives the same curve, bit for bit: one rollout, an order that no clock decides.

Three worlds: the manager alone, where only the timing differs; a run on an emulated engine; a run on vLLM, whose numbers depend on which answers are decoded together.
"""
import random, time

import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import GRPO, Eval, Sampling
from laminar_sdk.scheduling import commands as cm
from scheduling_world import World, config
from test_run import finish, model # noqa: F401
from test_run_ranks import images


def decided(world):
    "Every wave and every batch, as they were ordered"
    for _, commands in world.log:
        for c in commands:
            if isinstance(c, cm.StartWave | cm.Continue): yield c.version, [(p.trajectory, p.prompt, p.sample_index, p.kind, p.first) for p in c.placements]
            if isinstance(c, cm.GiveBatch): yield c.step, c.groups, c.trajectories


@pytest.mark.parametrize('capacity', [4, 64]) # of 12 answers of a step
def test_no_clock_decides_anything(capacity):
    def of(seed): return list(decided(World(config(schedule='sync', eval=Eval(every=2)), n_eval=5, rollouts=1, hosts=1, capacity=capacity, seed=seed).run()))
    first, *others = map(of, range(6))
    assert len([x for x in first if len(x) == 3]) == 6 and all(x == first for x in others)


@pytest.mark.parametrize('schedule', ['sync', 'laminar', 'stream'])
def test_a_batch_stands_as_its_prompts_were_drawn(schedule):
    world = World(config(schedule=schedule), seed=1).run()
    given = [c for _, commands in world.log for c in commands if isinstance(c, cm.GiveBatch)]
    scored = [e.group for e, _ in world.log if isinstance(e, ev.GroupScored)]
    assert all(c.groups == sorted(c.groups) for c in given) and any(c.groups != [g for g in scored if g in c.groups] for c in given)


def curve(run, folder):
    "Checksum of each version, and what the actor said of each step"
    s, counts, seen = finish(run)
    steps = [r.event.metrics for r in seen if isinstance(r.event, ev.StepDone)]
    told = [(r.event.step, r.event.accuracy) for r in seen if isinstance(r.event, ev.EvalDone)]
    assert all(m['staleness_max'] == 0 for m in steps) and counts['train']['trained'] == 5 * 4 * 4
    return {v: checksum for v, (checksum, _) in images(folder).items()}, [{k: m.get(k) for k in ('reward', 'loss', 'grad_norm', 'logprob_gap_max')} for m in steps], told


def at_its_own_pace(completions, **kw):
    "Groups complete in any order"
    time.sleep(.1 * random.random())
    return [len(c) / 100 for c in completions]


@pytest.mark.ray
@pytest.mark.timeout(480)
def test_twice_on_an_emulated_engine(cluster, model, tmp_path): # noqa: F811
    from test_run import start
    eval = Eval(prompts=[dict(prompt='1+1=', answer='2')] * 6, every=2, sampling=Sampling(max_tokens=20))
    a, b = (curve(start(cluster, model, tmp_path, f'emulated-{i}', at_its_own_pace, steps=5, n=4, group=4, replicas=1, eval=eval, schedule='sync', colocated=True),
                  tmp_path/f'emulated-{i}') for i in range(2))
    assert len(a[0]) == len(set(a[0].values())) == 6 and a == b


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(500)
def test_twice_on_vllm(cluster, tmp_path, figures):
    from laminar_sdk.all import RelayTier, Replicas, RolloutPool, Trainer
    from laminar_sdk.demo import arithmetic
    task = arithmetic()
    cluster.connect()
    def once(i):
        relays = RelayTier(cluster, keep=4)
        pool = RolloutPool(cluster, task.model, relays, replicas=[Replicas(1, max_running=12)], max_model_len=task.max_model_len)
        trainer = Trainer(cluster, task.model, relays, GRPO(group_size=4, lr=task.lr))
        run = trainer.fit(pool, task.train, task.reward, name=f'twice-{i}', steps=5, prompts_per_step=4, sampling=task.sampling, schedule='sync', seed=3,
                          eval=Eval(prompts=task.held_out[:24], sampling=task.sampling, every=2), checkpoint=2, run_dir=str(tmp_path/f'twice-{i}'))
        return curve(run, tmp_path/f'twice-{i}')
    a, b = once(0), once(1)
    figures.update(versions=len(a[0]), first_that_differs=min((v for v in a[0] if a[0][v] != b[0].get(v)), default=None), steps=a[1])
    assert len(a[0]) == len(set(a[0].values())) == 6 and a == b
