"""A whole run with emulated engines: real Ray, real relays, real actor, real processes killed with -9; only tokens are random.

The session's embedded cluster serves the file. Each test has a run of its own.
"""
import json, os, random, signal, subprocess, sys, time
from pathlib import Path

import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import GRPO, Buffer, Curriculum, Eval, Mixture, Reward, Sampling
from laminar_sdk.core.errors import ConfigError, MissingError, RunError
from laminar_sdk.past_run import PastRun

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
STEPS, P, G = 4, 2, 2


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "A tiny random Qwen2 with one token a character"
    from laminar_sdk.training.policy import random_policy
    folder = tmp_path_factory.mktemp('model')
    p = random_policy()
    p.model.save_pretrained(folder)
    p.tokenizer.save_pretrained(folder)
    return str(folder)


def length(completions, **kw): return [len(c) / 100 for c in completions]


def start(cluster, model, folder, name, reward=length, steps=STEPS, n=P, group=G, replicas=2, eval=None, prompts=None, sampling=Sampling(max_tokens=40),
          engine={}, repack=None, algorithm={}, **fit):
    from laminar_sdk.relay_tier import RelayTier
    from laminar_sdk.rollout_pool import RolloutPool
    from laminar_sdk.trainer import Trainer
    relays = RelayTier(cluster, keep=4)
    pool = RolloutPool(cluster, model, relays, replicas=replicas, max_model_len=64, max_running=8, engine='emulated', repack=repack,
                       **({'step_s': .005} | engine))
    trainer = Trainer(cluster, model, relays, GRPO(group_size=group, lr=1e-3, **algorithm))
    rows = prompts or [dict(prompt=f'{a}+{b}=', answer=str(a + b)) for a in range(5) for b in range(5)]
    return trainer.fit(pool, rows, reward, name=name, steps=steps, prompts_per_step=n, sampling=sampling, eval=eval, checkpoint=2,
                       run_dir=str(folder/name), **fit)


def finish(run, state='done'):
    "Wait for the end, check that everything adds up, give it back"
    s = run.wait(show=False, check=False)
    assert s['state'] == state, s
    assert run.audit() == []
    counts, seen = run.counts(), run.events(max_items=100_000)
    run.close()
    return s, counts, seen


def until(condition, seconds=60):
    "Wait until a condition holds"
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, 'it did not come about'
        time.sleep(.05)
    return found


def running(run, step=1): return until(lambda: (s := run.status())['step'] >= step and s)


def notices(seen): return [r.event.text for r in seen if isinstance(r.event, ev.Notice)]


def test_a_checkpoint_that_cannot_be_written(cluster, model, tmp_path):
    "The run pauses and says why, and its actor lives on; resumed, it saves after the next step"
    run = start(cluster, model, tmp_path, 'full', steps=6)
    (folder := tmp_path/'full'/'checkpoints').mkdir(parents=True, exist_ok=True)
    (way := folder/'in-the-way.tmp').touch() # no folder, so that it cannot be cleared away like one
    s = until(lambda: (s := run.status())['state'] == 'paused' and s)
    assert s['step'] < 6 and s['manager']['checkpointed'] == 0 and not list(folder.glob('step-*.tmp'))
    way.unlink()
    run.resume()
    s, counts, seen = finish(run)
    assert any('could not be written' in t for t in notices(seen)) and counts['train']['trained'] == 6 * P * G
    assert s['children']['actor/0']['restarts'] == 0 and sorted(int(p.name[5:]) for p in folder.glob('step-*') if p.is_dir())[0] <= s['step']


def test_to_the_end(cluster, model, tmp_path):
    eval = Eval(prompts=[dict(prompt='1+1=', answer='2')] * 6, sampling=Sampling(max_tokens=20))
    run = start(cluster, model, tmp_path, 'end', eval=eval)
    with pytest.raises(RunError, match='alive'): start(cluster, model, tmp_path, 'end')
    s, counts, seen = finish(run)
    steps = [r.event for r in seen if isinstance(r.event, ev.StepDone)]
    assert [e.step for e in steps] == list(range(1, STEPS + 1))
    assert counts['train']['trained'] == STEPS * P * G and counts['eval']['scored'] + counts['eval'].get('reported', 0) >= 6
    evals = [r.event for r in seen if isinstance(r.event, ev.EvalDone)]
    assert [e.step for e in evals] == [0, STEPS] and all(e.n == 6 for e in evals)
    assert {'reward', 'staleness_mean', 'staleness_max', 'gen_tokens_per_s', 'tokens_per_s', 'length_median', 'length_p99', 'publish_stall_s'} <= set(steps[0].metrics)
    folder = Path(s['run_dir'])
    assert {p.name for p in folder.iterdir() if p.name[0] != '.'} >= {'config.json', 'ledger.sqlite', 'events', 'trajectories', 'prompts', 'functions', 'checkpoints'}
    import datasets
    table = datasets.load_dataset('parquet', data_files=str(folder/'trajectories'/'*.parquet'), split='train', cache_dir=str(tmp_path/'cache'))
    assert len(table) >= STEPS * P * G and 'response_ids' in table.column_names
    audit = subprocess.run([sys.executable, '-m', 'laminar_sdk.cli', 'audit', str(folder)], capture_output=True, text=True)
    assert audit.returncode == 0 and 'The ledger adds up' in audit.stdout, audit.stdout + audit.stderr
    from laminar_sdk.shells import names
    assert names('end/') == []
    assert list(run.history().index) == list(range(1, STEPS + 1)) and run.audit() == [] and len(run.evaluations()) == 2 # from its directory
    row = run.trajectories(4)[0]
    assert row['prompt'][1] == '+' and len(row['response']) >= len(row['response_ids']) - 1 and isinstance(row['reward'], float) and row['answer'] is not None
    with pytest.raises(MissingError, match=s['run_dir']): run.status()


def parity(completions, source, **kw):
    "Of one source all answers are the same, of the other they differ"
    return [float(s == 'other' and i % 2) for i, s in enumerate(source)]

def test_sources_sets_groups_that_teach_nothing_and_a_coordinator_that_dies(cluster, model, tmp_path):
    "Prompts of two sources, of which one yields nothing; two held-out sets; an order of the buffer; and kill -9 in the middle"
    rows = {s: [dict(prompt=f'{a}+{b}=', answer=str(a + b)) for b in range(5)] for a, s in enumerate(('dull', 'other'))}
    run = start(cluster, model, tmp_path, 'mixed', reward=parity, steps=6, algorithm=dict(dynamic_sampling=True, refill_most=3), engine=dict(step_s=.01),
                prompts=Mixture(rows, weights=dict(dull=1, other=1), curriculum=Curriculum(window=4)), buffer=Buffer(order='priority', priority='std(rewards) - staleness'),
                eval=Eval(prompts={k: v[:2] for k, v in rows.items()}, samples=2, k=(1, 2), sampling=Sampling(max_tokens=20)))
    os.kill(running(run, 2)['pid'], signal.SIGKILL)
    s, counts, seen = finish(run)
    steps, evals = ([r.event for r in seen if isinstance(r.event, t)] for t in (ev.StepDone, ev.EvalDone))
    assert counts['train']['trained'] == 6 * P * G and counts['train']['filtered'] % G == 0 and max(e.metrics['filtered'] for e in steps) <= 2 * P
    assert evals[0].sets['other'] == dict(n=2, accuracy=.5, se=0., **{'pass@1': .5, 'pass@2': 1.}) and evals[0].sets['dull']['pass@2'] == 0. and evals[0].n == 4
    assert all(e.metrics['reward/other'] == .5 for e in steps if 'reward/other' in e.metrics) and any('reward/other' in e.metrics for e in steps)
    cursor = PastRun(s['run_dir']).ledger().meta['cursor']
    assert sum(cursor['positions']) == (counts['train']['trained'] + counts['train']['filtered']) // G and all(cursor['seen'])
    assert {r['source'] for r in run.trajectories(40)} == {'dull', 'other'}


VICTIMS = ['rollout/0', 'actor/0', 'data/0', 'relay/1', 'relay/0', 'coordinator']


def test_kill_9_of_each_in_turn_and_a_relay_that_is_stopped(cluster, model, tmp_path):
    eval = Eval(prompts=[dict(prompt='1+1=', answer='2')] * 3, sampling=Sampling(max_tokens=20), samples=2, k=(1, 2)) # one is told before the first kill
    run, step = start(cluster, model, tmp_path, 'kills', steps=60, engine=dict(step_s=.01), eval=eval), 0
    relay = running(run, 1)['children']['relay/1']['pid']
    os.kill(relay, signal.SIGSTOP) # a stopped process does not die
    until(lambda: any('relay/1 is left out' in t for t in notices(run.events(max_items=1000))))
    os.kill(relay, signal.SIGCONT)
    until(lambda: any('relay/1 is heard again' in t for t in notices(run.events(max_items=1000))))
    for victim in VICTIMS:
        s = running(run, step + 2)
        step = s['step']
        os.kill(s['pid'] if victim == 'coordinator' else s['children'][victim]['pid'], signal.SIGKILL)
    s = running(run, step + 2)
    for pid in (s['children']['relay/0']['pid'], s['children']['relay/1']['pid'], s['pid']): os.kill(pid, signal.SIGKILL) # only the actor has the newest version now
    _, counts, seen = finish(run)
    assert counts['train']['trained'] == 60 * P * G, counts
    evals = [r.event for r in seen if isinstance(r.event, ev.EvalDone)]
    assert [e.step for e in evals] == [0, 60] and all(e.n == 3 and e.samples == 2 for e in evals)
    said = '\n'.join(notices(seen))
    assert 'relay/0 has version' in said and 'nothing was published anew' in said, said
    for victim in ('rollout/0', 'actor', 'data', 'relay/1', 'relay/0', 'the coordinator'): assert f'{victim}: its process died' in said or (victim == 'the coordinator' and 'goes on from its directory' in said)


def test_a_rollout_whose_relay_is_stopped_pulls_from_a_neighbours(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'neighbour', steps=100_000, engine=dict(step_s=.01))
    relay = running(run, 1)['children']['relay/1']['pid']
    rollouts = lambda: run.status()['manager']['rollouts']
    os.kill(relay, signal.SIGSTOP)
    until(lambda: any('relay/1 is left out' in t for t in notices(run.events(max_items=10_000))))
    there, held = next((i, r['version']) for i, r in rollouts().items() if r['host'] == 1)
    until(lambda: there in rollouts() and (rollouts()[there]['version'] or 0) > held + 2, 40)
    run.stop()
    assert run.audit() == []


@pytest.mark.long
@pytest.mark.parametrize('victim', VICTIMS)
def test_kill_9(cluster, model, tmp_path, victim):
    run = start(cluster, model, tmp_path, f'kill-{victim.split("/")[0]}', steps=6)
    s = running(run, 2)
    pid = s['pid'] if victim == 'coordinator' else s['children'][victim]['pid']
    os.kill(pid, signal.SIGKILL)
    s, counts, seen = finish(run)
    assert counts['train']['trained'] == 6 * P * G, counts
    steps = [r.event for r in seen if isinstance(r.event, ev.StepDone)]
    assert max(e.step for e in steps) == 6
    versions = [e.metrics['version'] for e in steps]
    assert versions == sorted(set(versions)), 'a version number was used twice'
    assert any('goes on from its directory' in t or 'died' in t for t in notices(seen)), notices(seen)


def test_one_permit_and_a_member_killed_again_and_again(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'permit', n=1, steps=3, replicas=1, max_groups=1, engine=dict(step_s=.02))
    for i in range(3):
        s = until(lambda: (s := run.status())['children']['rollout/0']['up'] and s['manager']['rollouts'].get(0, {}).get('running') and s)
        os.kill(s['children']['rollout/0']['pid'], signal.SIGKILL)
        until(lambda: run.status()['children']['rollout/0']['restarts'] > i)
    _, counts, _ = finish(run)
    assert counts['train']['trained'] == 3 * G


def raises(completions, **kw): raise ZeroDivisionError('no reward today')
def hangs(completions, **kw): time.sleep(1000)
def nan(completions, **kw): return [float('nan')] * len(completions)
def too_few(completions, **kw): return [1.0]
def tensor(completions, **kw):
    import numpy as np
    return np.ones(len(completions))


def test_a_reward_that_never_works_ends_the_run_and_says_why(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'bad', reward=raises)
    with pytest.raises(RunError, match='no reward today'): run.wait(show=False)
    s, counts, _ = finish(run, 'failed')
    assert 'no reward today' in '\n'.join(run.logs())
    assert 'reward_error' in s['reason'] or 'no reward today' in s['reason'], s['reason']
    assert counts['train'].get('failed', 0) >= 3 * P * G


def test_a_reward_that_sometimes_fails_costs_only_those_groups(cluster, model, tmp_path):
    wrong = {'1': raises, '2': hangs, '3': nan, '4': too_few}
    def moody(prompts, completions, **kw):
        a, b = prompts[0][0], prompts[0][2]
        return (wrong.get(a, length) if b in '01' else length)(completions)
    run = start(cluster, model, tmp_path, 'moody', reward=Reward(fn=moody, timeout_s=1.0), steps=8, sampling=Sampling(max_tokens=40, stop=['=', '1']))
    s, counts, seen = finish(run)
    assert counts['train']['trained'] == 8 * P * G and counts['train']['failed'] % G == 0 and counts['train']['failed'] > 0
    from laminar_sdk.data.journal import Journal
    from laminar_sdk.scheduling.books import TrajectoryRow
    reasons = {row.reason for row in Journal(Path(s['run_dir'])/'ledger.sqlite', read_only=True).rows(TrajectoryRow) if row.state == 'failed'}
    assert reasons <= {'reward_error', 'reward_timeout', 'reward_nan', 'reward_shape'} and len(reasons) >= 2, reasons
    strings_end_an_answer(run.trajectories(100))


def strings_end_an_answer(rows):
    ends = {r['response'][-1] for r in rows if r['response_ids'][-1] != 1 and r['finish_reason'] == 'stop'}
    assert ends == {'=', '1'} and not any(c in r['response'][:-1] for r in rows for c in '=1') and all(all(r['loss_mask']) for r in rows)


def test_groups_of_one_equal_rewards_tensors_few_prompts_one_too_long_and_a_tracker_that_fails(cluster, model, tmp_path):
    rows = [dict(prompt='1+2='), dict(prompt='1+' * 60 + '1=')] # fewer than a batch
    run = start(cluster, model, tmp_path, 'one', reward=tensor, group=1, steps=2, prompts=rows, trackers={'tensorboard': dict(no_such_argument=1)})
    _, counts, seen = finish(run)
    assert counts['train']['trained'] == 2 * P
    assert all(abs(e.event.metrics['loss']) < 1e-6 for e in seen if isinstance(e.event, ev.StepDone))
    assert any('1 prompts are longer' in t for t in notices(seen)), notices(seen)
    assert any('trackers (tensorboard)' in t for t in notices(seen)) # a notice and no more
    assert sum(n for r in seen if isinstance(r.event, ev.WorkSeen) for *_, n in r.event.ended) >= 2 * P # every answer that was scored is counted


KEPT = dict(engine=dict(keep=True, step_s=.006), replicas=1)


def test_attach_from_another_process_pause_resume_stop(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'steer', steps=1_000_000, **KEPT)
    running(run, 1)
    code = ("from laminar_sdk.all import *; c = Cluster.local(); r = Run.attach(c, 'steer'); "
            "print(r.status()['state'], [x.name for x in Run.list(c)]); r.pause()")
    said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=100)
    assert "running ['steer']" in said.stdout, said.stdout + said.stderr
    def stands(): return (before := run.status()['step'], time.sleep(1), run.status()['step'] == before)[-1] # what is in flight ends first
    until(stands)
    before = run.status()['step']
    assert stands() and run.status()['step'] == before and run.status()['state'] == 'paused'
    run.resume()
    running(run, before + 1)
    children = run.status()['children']
    with pytest.raises(RunError, match="lent to the run 'steer'"): start(cluster, model, tmp_path, 'second', **KEPT)
    refused_by_the_rollout_itself(cluster, model)
    run.stop()
    kept = children.pop('rollout/0')['pid']
    until(lambda: not any(Path(f"/proc/{c['pid']}").exists() for c in children.values()))
    from laminar_sdk.shells import names
    assert names('steer/') == [] and Path(f'/proc/{kept}').exists()
    with pytest.raises(MissingError, match='steer'): run.status()
    serves_again(cluster, model, tmp_path, kept)


def refused_by_the_rollout_itself(cluster, model):
    "Two that ask in the same moment have both seen nobody: the rollout decides, and the loser gets an error of ours, with its words"
    import ray
    from laminar_sdk.kept_pool import living
    from laminar_sdk.rollout_pool import RolloutPool
    pool = RolloutPool(cluster, model, None, max_model_len=64, max_running=8, engine='emulated', **KEPT['engine'])
    with pytest.raises(RunError) as e: ray.get(living(pool)[0].lend.remote('other', 'launch', 0, {}, 1))
    assert "lent to the run 'steer'" in e.value.message


def serves_again(cluster, model, tmp_path, kept):
    "The kept pool that the run before has left: another run, whose coordinator dies, and then a rollout; closed at the end"
    from laminar_sdk.kept_pool import living
    from laminar_sdk.rollout_pool import RolloutPool
    run = start(cluster, model, tmp_path, 'second', steps=12, **KEPT)
    assert running(run, 1)['children']['rollout/0']['pid'] == kept
    os.kill(run.status()['pid'], signal.SIGKILL) # the loan outlives its coordinator
    assert running(run, 4)['children']['rollout/0']['pid'] == kept
    os.kill(kept, signal.SIGKILL)
    _, counts, _ = finish(run)
    assert counts['train']['trained'] == 12 * P * G
    pool = RolloutPool(cluster, model, None, max_model_len=64, max_running=8, engine='emulated', **KEPT['engine'])
    assert [*living(pool)] == [0]
    pool.start(show=False).close()
    assert living(pool) == {}


def test_stopped_then_resumed_from_its_folder(cluster, model, tmp_path):
    from laminar_sdk.run import Run
    run = start(cluster, model, tmp_path, 'again', steps=14)
    running(run, 3)
    folder = run.status()['run_dir']
    run.stop()
    config = Path(folder)/'config.json'
    old = json.loads(config.read_text())
    old['engine'], = old.pop('engines') # as before there were pools of several kinds
    for new in ('format', 'code_version', 'transport', 'trackers', 'kinds', 'mixture'): old.pop(new)
    config.write_text(json.dumps(old | dict(stepz=3)))
    with pytest.raises(ConfigError, match="'stepz' that nobody knows here; did you mean 'steps'"): Run.resume(folder, cluster)
    config.write_text(json.dumps(old))
    back = Run.resume(folder, cluster)
    s, counts, seen = finish(back)
    assert counts['train']['trained'] == 14 * P * G and s['run_dir'] == folder


def interrupt(cluster, model, folder, n, seed):
    "Start n runs and interrupt each at a random moment of `fit`"
    from laminar_sdk.shells import names
    rng = random.Random(seed)
    import threading
    hit = 0
    for i in range(n):
        timer = threading.Timer(rng.uniform(0, 1.2), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            run = start(cluster, model, folder, f'int-{i}')
            timer.join()
            time.sleep(.1)
            run.stop()
        except KeyboardInterrupt:
            hit += 1
            from laminar_sdk.run import Run
            for r in Run.list(cluster):
                if r.name == f'int-{i}': r.stop() # fit had returned: the run is the user's to stop
        finally: timer.cancel()
        until(lambda: names(f'int-{i}/') == [])
    return hit


def test_interrupted_fit_leaves_no_actor(cluster, model, tmp_path): interrupt(cluster, model, tmp_path, 2, seed=1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_interrupted_fit_leaves_no_actor_20_times(cluster, model, tmp_path): assert interrupt(cluster, model, tmp_path, 20, seed=2) > 5


def test_bad_arguments_are_errors_in_the_cell(cluster, model, tmp_path):
    for kw, kind, words in ((dict(name='no/slash'), ConfigError, 'name'), (dict(prompts=[dict(question='x')]), ConfigError, 'prompt'),
                            (dict(template='{nothing}'), ConfigError, 'nothing'), (dict(schedule='nope'), ConfigError, 'schedule'), (dict(colocated=True), ConfigError, 'sync'),
                            (dict(reward=lambda x: 1.), ConfigError, 'by keyword'), (dict(prompts=[dict(prompt=[dict(role='user', content='x')])]), ConfigError, 'chat template'),
                            (dict(sampling=Sampling(top_p=.5)), ConfigError, 'top_p')):
        with pytest.raises(kind, match=words): start(cluster, model, tmp_path, **({'name': 'bad'} | kw))
    with pytest.raises(MissingError, match='nowhere'): start(cluster, 'nowhere', tmp_path, 'bad')
    from laminar_sdk.shells import names
    assert names('bad/') == []
