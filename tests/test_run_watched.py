"""What is set, asked and passed on while a run works: learning rate, staleness, thresholds, a checkpoint, trackers, answers to read. Emulated engines, all else is real."""
import os, signal, time, urllib.request
from pathlib import Path

import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.errors import ConfigError, MissingError
from test_run import model, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]


def steps(run): return [r.event for r in run.events(max_items=100_000) if isinstance(r.event, ev.StepDone)]


def test_what_is_set_acts_survives_a_crash_and_is_in_the_report(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'set', steps=100_000, engine=dict(step_s=.01), trackers=['tensorboard'])
    running(run, 2)
    for wrong in (dict(lr=0), dict(lr=2.), dict(max_staleness=-1), dict(max_staleness=1.5)):
        with pytest.raises(ConfigError): run.set(**wrong)
    run.set(lr=5e-4, max_staleness=2)
    run.pool.repack(False, batch=3, kv_max=.5)
    until(lambda: steps(run)[-1].metrics['lr'] == 5e-4)
    run.pause()
    until(lambda: run.status()['state'] == 'paused')
    saved = run.checkpoint(timeout_s=60) # the actor waits for its batch, and has time
    assert saved == run.status()['step'] == run.checkpoint()
    assert (Path(run.status()['run_dir'])/'checkpoints'/f'step-{saved:06d}').is_dir()
    run.resume()

    old = run.status()['pid']
    os.kill(old, signal.SIGKILL)
    step = running(run, saved + 1)['step']
    s = until(lambda: (s := running(run, step + 2)) and s['manager'].get('rollouts') and s)
    m = s['manager']
    assert s['pid'] != old and (m['lr'], m['max_staleness'], m['repack']['on'], m['repack']['batch'], m['repack']['kv_max']) == (5e-4, 2, False, 3, .5)
    until(lambda: all(r['batch'] == 3 for r in run.status()['manager']['rollouts'].values()))
    assert steps(run)[-1].metrics['lr'] == 5e-4
    run.set(max_staleness=None)
    assert run.status()['manager']['max_staleness'] is None

    rows = run.browse(50)
    assert len(rows) > 8 and rows[-1]['said'] and run.trajectory(rows[-1]['id'])['logprobs'] and len(run.group(rows[-1]['group'])) >= 1
    with pytest.raises(MissingError): run.trajectory(10**9)
    past = run.glance()
    assert past[-1].seq >= 1 and {ev.StepDone, ev.PoolSeen, ev.WorkSeen} <= {type(r.event) for r in past}

    page = run.report(tmp_path/'report.html').read_text()
    for text in ('learning rate 0.0005 from the next step on', 'staleness is bounded by 2 versions', 'no repack any more, B 3, C_max 0.5', 'a checkpoint is asked for'): assert text in page, text
    told = [r.step for r in recorded(s['run_dir'])] if Path(s['run_dir']).exists() else []
    run.stop()
    assert run.audit() == [] and run.browse(5).rows and run.trajectory(rows[-1]['id'])['id'] == rows[-1]['id'] # from its directory
    trained = [r.event.step for r in run.events(max_items=100_000) if isinstance(r.event, ev.StepDone)]
    assert sorted({r.step for r in recorded(s['run_dir'])}) == sorted(set(trained)) and told


def recorded(run_dir): # what TensorBoard has of the reward
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    m = EventMultiplexer().AddRunsFromDirectory(str(Path(run_dir)/'trackers')).Reload()
    return [s for name in m.Runs() if 'train/reward' in m.Runs()[name]['scalars'] for s in m.Scalars(name, 'train/reward')]


@pytest.mark.long
def test_ray_offers_the_metrics(laminar_home, disconnected, model, tmp_path):
    "Ray's agent, which answers Prometheus, is there only with its dashboard"
    import ray
    from laminar_sdk.cluster import Cluster
    cluster = Cluster.local('metrics', dashboard=True)
    try:
        run = start(cluster, model, tmp_path, 'measured', steps=100_000, engine=dict(step_s=.02))
        running(run, 2)
        node = ray.nodes()[0]
        def offered():
            with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=5) as r: text = r.read().decode()
            return [line for line in text.splitlines() if line.startswith('ray_laminar_reward{') and 'run="measured"' in line]
        assert until(offered, 60)
        run.stop()
    finally: cluster.shutdown()
