"""Runs whose answers are conversations: environments in real processes, killed and misbehaving while the run works. Engines are emulated, all else is real.

The environment's answer is a checksum of what it was asked, so every answer in the trajectory store shows by itself whether it belongs where it stands."""
import asyncio, collections, os, random, signal, time
from pathlib import Path

import psutil, pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import Eval, Repack, Reward, Sampling
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.rollout.environment import Environment, Observation, Step
from test_run import finish, length, model, notices, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]


class Checks(Environment):
    "Every turn of three tokens or so is answered with its checksum, and rewarded"
    stops, max_turns, deterministic, concurrency, seconds = tuple('=+12'), 5, True, 64, 0.
    async def reset(self, task, seed):
        self.task, self.seed, self.n = task, seed, 0
        return Observation('0')
    async def step(self, text, ids):
        self.n += 1
        print(f'asked {self.seed} {self.n}\n', end='') # in one piece
        await asyncio.sleep(self.seconds)
        return Step(checksum(ids), reward=.25)

def checksum(ids): return str(sum(i * k for k, i in enumerate(ids, 1)) % 1000)

def slow(seconds, cls=Checks):
    env = cls()
    env.seconds = seconds
    return env


def conversations(run, model, n=1000):
    "The answers of a run, each of which was looked at"
    from laminar_sdk.rollout.stops import Codec
    from laminar_sdk.training.policy import load_tokenizer
    codec, rows = Codec(load_tokenizer(model)), run.trajectories(n)
    for r in rows:
        ids, mask, spans = r['response_ids'], r['loss_mask'], [(s['start'], s['end']) for s in r['turn_spans']]
        assert [i for a, b in spans for i in range(a, b)] == [i for i, m in enumerate(mask) if m] and len(ids) == len(mask) == len(r['logprobs'])
        assert all(p == 0 for p, m in zip(r['logprobs'], mask) if not m) and all(p < 0 for p, m in zip(r['logprobs'], mask) if m)
        told = [codec.text(ids[a:b]) for a, b in zip([0, *(b for _, b in spans)], [*(a for a, _ in spans), len(ids)])]
        assert told[0] == '0' and told[-1] == '' and told[1:-1] == [checksum(ids[a:b]) for a, b in spans[:-1]], (r['id'], told)
        assert r['finish_reason'] in ('length', 'max_turns') and len(ids) <= 40 and len(spans) <= 5
    return rows


def test_to_the_end(cluster, model, tmp_path):
    "An environment that rewards, beside a reward function and an evaluation; what was told is masked, and nothing is asked twice"
    eval = Eval(prompts=[dict(prompt='1+1=', answer='2')] * 6, sampling=Sampling(max_tokens=20))
    with pytest.raises(ConfigError, match='neither reward nor environment'): start(cluster, model, tmp_path, 'talk', reward=None)
    with pytest.raises(ConfigError, match='Sampling.stop'): start(cluster, model, tmp_path, 'talk', environment=Checks(), sampling=Sampling(stop=['=']))
    run = start(cluster, model, tmp_path, 'talk', reward=Reward(fn=length, weight=0.), environment=Checks(), eval=eval)
    s, counts, seen = finish(run)
    rows, steps = conversations(run, model), [r.event.metrics for r in seen if isinstance(r.event, ev.StepDone)]
    assert counts['train']['trained'] == 16 and counts['train']['failed'] == 0 and sum(r['kind'] == 'eval' for r in rows) >= 12
    assert len({len(r['turn_spans']) for r in rows}) > 1 and all(r['reward'] in (.25 * (len(r['turn_spans']) - 1), .25 * len(r['turn_spans'])) for r in rows)
    assert all(m['logprob_gap_mean'] < 100 and m['tokens'] <= sum(map(sum, rows['loss_mask'])) for m in steps if 'logprob_gap_mean' in m)
    assert len(asked(run)) == len(set(asked(run))) > 20


def asked(run): # seed and turn; the evaluations of a prompt share their seed
    said = [tuple(map(int, line.split()[-2:])) for line in run.logs('environment', 10_000) if 'asked' in line]
    return [(seed, n) for seed, n in said if seed > 1000]


def environments(s): # pids
    return [p.pid for p in psutil.Process(s['children']['data/0']['pid']).children() if 'environment_child' in ' '.join(p.cmdline())]


def test_a_rollout_dies_while_its_trajectories_wait_for_their_tool(cluster, model, tmp_path):
    "They go on elsewhere, and their tool, which is still busy with them, is not asked again"
    run = start(cluster, model, tmp_path, 'wait', reward=None, environment=slow(4., Once), n=1, steps=2, replicas=2, max_groups=1, engine=dict(step_s=0.))
    def waiting(): # nothing is generated, and yet something runs
        s = run.status()
        busy = [i for i, r in s['manager'].get('rollouts', {}).items() if r['running'] and r['version'] is not None and not r['engine_running']]
        return s['children']['data/0']['up'] and environments(s) and busy and (s, busy)
    until(waiting)
    time.sleep(1.)
    s, busy = until(waiting)
    for i in busy: os.kill(s['children'][f'rollout/{i}']['pid'], signal.SIGKILL)
    _, counts, _ = finish(run)
    rows = conversations(run, model)
    assert counts['train']['trained'] == 4 and counts['train']['failed'] == 0 and sum(r['moves'] > 0 for r in rows) >= 2
    assert len(asked(run)) == len(set(asked(run))) >= 4


class Once(Checks):
    "The first turn takes long"
    async def step(self, text, ids):
        if self.n: self.seconds = 0.
        return await super().step(text, ids)


@pytest.mark.long
def test_everything_dies_and_every_answer_stands_where_it_belongs(cluster, model, tmp_path):
    run, step = start(cluster, model, tmp_path, 'talk-kills', reward=None, environment=slow(.05), steps=100_000, n=4, replicas=3, engine=dict(step_s=.01),
                      repack=Repack(every=.3)), 0
    rng = random.Random(0)
    for victim in ('environment', 'rollout/0', 'environment', 'coordinator', 'data/0', 'environment', 'rollout/1'):
        s = running(run, step + 1)
        step = s['step']
        for pid in environments(s) if victim == 'environment' else [s['pid'] if victim == 'coordinator' else s['children'][victim]['pid']]: os.kill(pid, signal.SIGKILL)
        time.sleep(rng.random())
    running(run, step + 2)
    run.stop()
    rows, counts = conversations(run, model), run.counts()['train']
    assert run.audit() == [] and counts['failed'] == counts['dropped'] == 0 and len(rows) > 50 and any(r['moves'] for r in rows)


class Unruly(Checks):
    "What it does depends on the problem; that nothing of it is left is seen when the session ends"
    timeout_s = reset_timeout_s = 1.5
    async def reset(self, task, seed):
        if task['answer'] == '2': raise ZeroDivisionError('no game today')
        return await super().reset(task, seed)
    async def step(self, text, ids):
        import os, time
        answer = self.task['answer']
        if answer == '3': time.sleep(1000)
        if answer == '4': os._exit(3)
        if answer == '5': print('x' * 5_000_000)
        if answer == '6': return Step('y' * 5_000_000)
        if answer == '7':
            for _ in range(20):
                if not os.fork(): time.sleep(1000)
        return await super().step(text, ids)


def test_environments_that_misbehave_cost_their_own_trajectory_and_no_other(cluster, model, tmp_path):
    from laminar_sdk.data.journal import Journal
    from laminar_sdk.scheduling.books import TrajectoryRow
    run = start(cluster, model, tmp_path, 'unruly', reward=None, environment=Unruly(), n=4, steps=3)
    s, counts, seen = finish(run)
    rows = [r for r in Journal(Path(s['run_dir'])/'ledger.sqlite').rows(TrajectoryRow) if r.state == 'failed']
    assert counts['train']['trained'] >= 14 and counts['train']['running'] == 0
    reasons = collections.Counter(r.reason.removeprefix('refused: ') for r in rows)
    assert reasons['env_error'] >= 2 and reasons['env_timeout'] >= 2 and reasons['env_lost'] >= 2, reasons
    assert not any('no game' in str(r.event) for r in seen) and any('no game today' in line for line in run.logs('environment', 10_000))

