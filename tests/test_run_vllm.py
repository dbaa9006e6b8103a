"""A whole run on two real vLLM engines of different size, two of whose processes are killed with -9 in the middle of it. One start for everything here."""
import os, signal, time

import pytest

from laminar_sdk.core import events as ev

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(800)]
STEPS = 12


def test_the_demo_with_a_rollout_and_an_engine_killed(cluster, tmp_path):
    import ray
    from laminar_sdk.all import GRPO, Eval, RelayTier, Replicas, RolloutPool, Trainer
    from laminar_sdk.demo import arithmetic
    from laminar_sdk.shells import find
    task = arithmetic()
    cluster.connect()
    relays = RelayTier(cluster, keep=4)
    kinds = [Replicas(1, name='large', max_running=32), Replicas(1, name='small', max_running=4, kv_cache_bytes=8 << 20)]
    pool = RolloutPool(cluster, task.model, relays, replicas=kinds, max_model_len=task.max_model_len)
    trainer = Trainer(cluster, task.model, relays, GRPO(group_size=4, lr=task.lr))
    run = trainer.fit(pool, task.train, task.reward, name='killed', steps=STEPS, prompts_per_step=4, sampling=task.sampling,
                      eval=Eval(prompts=task.held_out[:16], sampling=task.sampling), checkpoint=4, run_dir=str(tmp_path/'killed'))
    s = _at(run, 2, lambda there: len(there) == 2 and there[0]['running'] > 4) # a wave is a share of the step, by batch size: never more than 4 for the small one
    large, small = (s['manager']['rollouts'][i] for i in (0, 1))
    assert small['batch'] <= 4 < large['batch'] <= 32 and large['kv_tokens'] > 8 * small['kv_tokens'] > 0, (large, small) # each measured by itself
    os.kill(s['children']['rollout/0']['pid'], signal.SIGKILL)
    _at(run, 4)
    engine, = ray.get(find('killed/rollout/1').engine_pids.remote())
    os.kill(engine, signal.SIGKILL)
    s = run.wait(show=False)
    assert s['state'] == 'done' and run.audit() == []
    assert run.counts()['train']['trained'] == STEPS * 4 * 4
    said = ' '.join(r.event.text for r in run.events(max_items=10_000) if isinstance(r.event, ev.Notice))
    assert 'rollout/0: its process died' in said and 'rollout/1: its engine died' in said, said
    gaps = run.history()['logprob_gap_max'].dropna() # the engines compute what the actor computes, after every pull and restart
    assert len(gaps) and gaps.max() < 1e-3, gaps
    assert [e.step for e in run.evaluations()] == [0, STEPS]
    run.stop()


def _at(run, step, ready=lambda there: True, seconds=400):
    "The status from that step on, as soon as the rollouts are as they are wanted"
    deadline = time.monotonic() + seconds
    while True:
        s = run.status()
        there = s['manager'].get('rollouts', {})
        assert there.get(1, {}).get('running', 0) <= 4, there
        if s['step'] >= step and ready(there): return s
        assert time.monotonic() < deadline and s['state'] in ('starting', 'running'), s
        time.sleep(.1)
