"""Runs whose answers are conversations: environments in real processes, killed and misbehaving while the run works. Engines are emulated, all else is real.

The environment's answer is a checksum of what it was asked, so every answer in the trajectory store shows by itself whether it belongs where it stands."""
import asyncio, os, signal, time
from pathlib import Path

import numpy as np
import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import Eval, Reward, Sampling
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.rollout.environment import Environment, Observation, Step
from test_run import finish, length, model, notices, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


class Checks(Environment):
    "Every turn of three tokens or so is answered with its checksum, and rewarded"
    stops, max_turns, deterministic, concurrency, seconds = tuple('=+12'), 5, True, 64, 0.
    async def reset(self, task, seed):
        self.answer = task['answer']
        return Observation('0')
    async def step(self, text, ids):
        await asyncio.sleep(self.seconds)
        return Step(checksum(ids), reward=.25)

def checksum(ids): return str(sum(i * k for k, i in enumerate(ids, 1)) % 1000)

def slow(seconds):
    env = Checks()
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
    eval = Eval(prompts=[dict(prompt='1+1=', answer='2')] * 6, sampling=Sampling(max_tokens=20))
    run = start(cluster, model, tmp_path, 'talk', reward=None, environment=Checks(), eval=eval)
    s, counts, seen = finish(run)
    rows = conversations(run, model)
    assert len(rows) >= 16 and {len(r['turn_spans']) for r in rows} > {1}
    print(rows[0], counts, [r.event for r in seen if isinstance(r.event, ev.StepDone)][-1])
