"""A run with ReMax: one greedy answer to each prompt, from the pool. Emulated engines with processes killed, and one short run on a real vLLM engine."""
import json, os, signal
from collections import Counter

import numpy as np
import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import ReMax, Sampling
from laminar_sdk.core.types import GREEDY
from laminar_sdk.past_run import PastRun
from test_run import finish, length, model, notices, running, until # noqa: F401 (a fixture among them)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
P = 3 # prompts of a step


def begin(cluster, model, folder, name, n, steps, **fit):
    from laminar_sdk.relay_tier import RelayTier
    from laminar_sdk.rollout_pool import RolloutPool
    from laminar_sdk.trainer import Trainer
    relays = RelayTier(cluster, keep=4)
    pool = RolloutPool(cluster, model, relays, replicas=2, max_model_len=64, max_running=8, engine='emulated', step_s=.01)
    rows = [dict(prompt=f'{a}+{b}=', answer=str(a + b)) for a in range(5) for b in range(5)]
    return Trainer(cluster, model, relays, ReMax(group_size=n, lr=1e-3)).fit(pool, rows, length, name=name, steps=steps, prompts_per_step=P, sampling=Sampling(max_tokens=40), checkpoint=2,
                                                                            run_dir=str(folder/name), **fit)


def stored(folder, steps, n):
    "What the run left: whole groups, of which the greedy answer alone was drawn at temperature 0"
    past = PastRun(folder)
    table, trained = past.trajectories(10_000), {r['step']: r for r in past.history().reset_index().to_dict('records')}
    rows, seen = list({t['id']: t for t in table if t['kind'] == 'train'}.values()), Counter()
    for t in rows:
        assert json.loads(t['sampling'])['temperature'] == (0. if t['sample_index'] == GREEDY else 1.)
        seen[t['group_id'], t['sample_index']] += 1
    whole = {g for g, _ in seen}
    assert set(seen.values()) == {1} and all((g, i) in seen for g in whole for i in (*range(n), GREEDY)), 'each answer once, each group whole'
    assert sorted(trained) == list(range(1, steps + 1)) and all(r['rows'] == P*n == r['trajectories'] for r in trained.values())
    by_group = {g: {t['sample_index']: t['reward'] for t in rows if t['group_id'] == g} for g in whole}
    assert np.mean([r['greedy_reward'] for r in trained.values()]) == pytest.approx(np.mean([by[GREEDY] for by in by_group.values()]), abs=.15)
    return past, rows


def test_every_process_is_killed_once_and_the_run_is_stopped_and_resumed(cluster, model, tmp_path):
    "With half groups in flight; each group is trained once, with its baseline"
    from laminar_sdk.run import Run
    n, steps = 2, 16
    run = begin(cluster, model, tmp_path, 'remax', n, steps)
    for step, who in enumerate(('rollout/0', 'data/0', 'actor/0'), 1):
        s = running(run, 2*step)
        os.kill(s['children'][who]['pid'], signal.SIGKILL)
    os.kill(running(run, 8)['pid'], signal.SIGKILL) # the coordinator
    running(run, 10)
    run.stop()
    run = Run.resume(str(tmp_path/'remax'), cluster)
    s, counts, seen = finish(run)
    assert counts['train']['trained'] == steps*P*(n + 1) and counts['train']['sampled'] == counts['train']['buffered'] == 0
    past, rows = stored(tmp_path/'remax', steps, n)
    assert past.audit() == [] and past.ledger().counts()['trained'] == steps*P*(n + 1)
    assert Counter(r['kind'] for r in past.group(rows[0]['group_id']).rows) == {'train': n, 'greedy': 1}


@pytest.mark.engine
def test_the_greedy_answer_of_a_real_engine(cluster, tmp_path):
    "It is what the weights say: at each place the most likely token; and it does not spoil the figures of engine and actor"
    import torch
    from laminar_sdk.all import RelayTier, RolloutPool, Trainer
    from laminar_sdk.demo import arithmetic
    from laminar_sdk.training.policy import load_policy
    task, n, steps = arithmetic(), 1, 4
    relays = RelayTier(cluster, keep=4)
    pool = RolloutPool(cluster, task.model, relays, replicas=1, max_model_len=task.max_model_len, max_running=32)
    run = Trainer(cluster, task.model, relays, ReMax(lr=task.lr)).fit(pool, task.train, task.reward, name='remax-vllm', steps=steps, prompts_per_step=8, sampling=task.sampling, schedule='partial',
                                                                    run_dir=str(tmp_path/'remax-vllm'))
    s, counts, _ = finish(run)
    assert counts['train']['trained'] == steps*8*2
    past = PastRun(tmp_path/'remax-vllm')
    history, rows = past.history(), [t for t in past.trajectories(1000) if t['sample_index'] == GREEDY and {v['version'] for v in t['versions']} == {0}]
    net = load_policy(task.model).model.eval()
    for t in rows:
        ids = torch.tensor([[*t['prompt_ids'], *t['response_ids']]])
        with torch.no_grad(): logits = net(ids).logits[0, len(t['prompt_ids']) - 1:-1]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(t['response_ids'])[:, None])[:, 0]
        assert gap.max() < 1e-3, 'a token that was not the most likely one'
    gaps = history['logprob_gap_max'].dropna()
    assert len(rows) >= 4 and len(gaps) and gaps.max() < 1e-3 and set(history['rows']) == {8}
    assert history['greedy_reward'].mean() > .5 > 0 and history['ess'].min() > .5
