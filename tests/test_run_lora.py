"""A whole run that learns with LoRA, on two real vLLM engines: versions are adapters; a rollout, an engine's host relay and the actor's relay are killed; it is stopped and goes on"""
import os, signal, time

import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import LoRA

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(500)]
STEPS = 12


def fit(cluster, folder, **lora):
    from laminar_sdk.all import GRPO, Eval, RelayTier, RolloutPool, Trainer
    from laminar_sdk.demo import arithmetic
    task = arithmetic()
    relays = RelayTier(cluster, keep=4)
    pool = RolloutPool(cluster, task.model, relays, replicas=2, max_running=16, max_model_len=task.max_model_len)
    trainer = Trainer(cluster, task.model, relays, GRPO(group_size=4, lr=2e-3), lora=LoRA(rank=8, targets='all-linear', **lora))
    return trainer.fit(pool, task.train, task.reward, name='lora', steps=STEPS, prompts_per_step=4, sampling=task.sampling,
                       eval=Eval(prompts=task.held_out[:16], every=6, sampling=task.sampling), checkpoint=4, run_dir=str(folder))


def at(run, step, seconds=200):
    deadline = time.monotonic() + seconds
    while (s := run.status())['step'] < step:
        assert time.monotonic() < deadline and s['state'] in ('starting', 'running'), s
        time.sleep(.1)
    return s


def test_adapters_through_deaths_and_a_stop(cluster, tmp_path, figures):
    import torch
    from safetensors.torch import load_file
    from laminar_sdk.all import Run
    from laminar_sdk.data.recorder import read
    from laminar_sdk.demo import arithmetic
    from laminar_sdk.training.checkpoint import check, export, export_adapter, newest_valid
    from laminar_sdk.training.policy import describe_model, load_policy
    folder = tmp_path/'lora'
    run = fit(cluster, folder)
    for step, who in ((1, 'rollout/0'), (3, 'relay/1'), (4, 'relay/0')): os.kill(at(run, step)['children'][who]['pid'], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while not (folder/'checkpoints'/'step-000008').exists():
        assert time.monotonic() < deadline, run.status()
        time.sleep(.1)
    run.stop()
    run = Run.resume(str(folder), cluster)
    s = run.wait(show=False)
    assert s['state'] == 'done' and run.audit() == [] and run.counts()['train']['trained'] == STEPS*4*4
    gaps, told = run.history()['logprob_gap_max'].dropna(), {e.step: e for e in run.evaluations()}
    assert len(gaps) and gaps.max() < 1e-3, gaps # engines compute what the actor computes, after every pull, death and resume
    run.stop()
    versions = {e.version: e for e in (r.event for r in read(folder/'events'/'manager')) if isinstance(e, ev.VersionReady)}
    whole = 2*describe_model(arithmetic().model).parameters
    assert len(versions) >= STEPS and len({e.nbytes for e in versions.values()}) == 1 and len({e.checksum for e in versions.values()}) >= STEPS - 1
    figures.update(version_bytes=next(iter(versions.values())).nbytes, whole_bytes=whole, evaluated=sorted(told), gap=float(gaps.max()))
    found, _ = newest_valid(folder/'checkpoints')
    assert found.name == 'step-000012' and check(found)['adapts']['base_sum']
    base, made = load_policy(arithmetic().model).model, load_policy(export(found, tmp_path/'merged')).model
    changed = [n for (n, a), (_, b) in zip(base.named_parameters(), made.named_parameters()) if not torch.equal(a.bfloat16().float(), b)]
    assert changed and all('proj' in n for n in changed)
    adapter = load_file(export_adapter(found, tmp_path/'adapter')/'adapter_model.safetensors')
    assert len(adapter) == 2*len([n for n, _ in base.named_parameters() if n.endswith('proj.weight')])
