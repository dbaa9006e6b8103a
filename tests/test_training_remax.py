"ReMax in the actor: each answer against the greedy one, of which nothing else is seen"
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.core.config import ReMax
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.core.types import GREEDY, Trajectory
from laminar_sdk.learning.baselines import baselines, compared
from test_training_actor import one_thread, reading, trajectories # noqa: F401 (fixtures)
from test_training_stream import Spy, equal, same

N = 3 # samples


def made(groups=5, seed=0, n=N):
    "Groups of n samples and a greedy answer: the last one, whose log-probs are those of a single point"
    rng, rows = np.random.default_rng(seed), trajectories(groups, n + 1, seed)
    for i, t in enumerate(rows):
        t.logprobs, t.versions = (np.log(1/19) + rng.normal(0, .2, len(t))).astype(np.float32), [(0, int(rng.integers(-2, 1)))]
        t.reward = float(rng.random() < .5 or t.group_id == 0) # a group of equals
        t.sample_index = i % (n + 1)
        if t.sample_index == n: t.sample_index, t.sampling, t.logprobs = GREEDY, dict(temperature=0.), np.zeros(len(t), np.float32)
    return rows


@given(order=st.permutations(range(12)), n=st.integers(1, 5))
def test_each_sample_meets_the_greedy_answer_of_its_group(order, n):
    rows = [Trajectory(10*g + i, g, g, i if i < n else GREEDY, reward=float(g)) for g in range(12//(n + 1)) for i in range(n + 1)]
    rows = [rows[i] for i in order if i < len(rows)]
    got = compared(rows)
    assert [t.id for t in got] == [t.id for t in rows if t.sample_index != GREEDY]
    assert all(g.sample_index == GREEDY and g.group_id == t.group_id for g, t in zip(baselines(got), got))
    assert compared(got) == got and baselines(compared(got)) == baselines(got) # once more changes nothing


def test_the_gradient_is_that_of_the_formula():
    batch, w = made(), Spy(ReMax(group_size=N))
    figures, samples = w.step(batch, 1), [t for t in batch if t.sample_index != GREEDY]
    model = Spy(ReMax()).model
    loss = 0.
    for t in samples: # −1/S Σ_i Σ_t min(ρA, clip(ρ)A)
        A = t.reward - next(g.reward for g in batch if g.group_id == t.group_id and g.sample_index == GREEDY)
        ids, p = torch.tensor([[*t.prompt_ids.tolist(), *t.response_ids.tolist()]]), len(t.prompt_ids)
        new = model(ids).logits[0, p - 1:-1].double().log_softmax(-1).gather(1, torch.tensor(t.response_ids).long()[:, None])[:, 0]
        ratio = (new - torch.tensor(t.logprobs).double()).exp()
        loss = loss - (torch.minimum(ratio*A, ratio.clamp(.8, 1.2)*A)*torch.tensor(t.loss_mask != 0)).sum()/len(samples)
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (w.seen - want).norm() <= 1e-5*want.norm()
    assert figures['rows'] == len(samples) and figures['reward'] == pytest.approx(np.mean([t.reward for t in samples]))
    assert figures['greedy_reward'] == pytest.approx(np.mean([t.reward for t in batch if t.sample_index == GREEDY]))
    by = {g: {t.reward for t in batch if t.group_id == g} for g in {t.group_id for t in batch}}
    assert figures['uniform_groups'] == sum(len(r) == 1 for r in by.values()) > 0


def test_nothing_of_a_greedy_answer_is_seen_but_its_reward():
    "Other tokens, log-probs, versions, another temperature: the same step, also where corrections and staleness weigh"
    a = ReMax(group_size=N, old='actor', corrections=['token_tis', 'staleness'])
    plain, odd = made(), made()
    for t in odd:
        if t.sample_index == GREEDY: t.response_ids, t.logprobs, t.versions = t.response_ids % 7 + 1, np.full(len(t), -30, np.float32), [(0, -9)]
    one, other = Spy(a), Spy(a)
    same(one.step(plain, 1), other.step(odd, 1))
    equal(one, other)
    for t in odd:
        if t.sample_index == GREEDY: t.reward = 1 - t.reward
    third = Spy(a)
    third.step(odd, 1)
    assert (third.seen - one.seen).norm() > .1*one.seen.norm()


def test_a_step_that_is_begun_early_is_the_same_step_and_a_new_baseline_undoes_what_was_begun():
    batch, whole, w = made(), Spy(ReMax(group_size=N)), Spy(ReMax(group_size=N))
    f = whole.step(batch, 1)
    for g in (3, 1): w.begin([t for t in batch if t.group_id == g], 1)
    figures = w.step(batch, 1)
    assert figures['begun_groups'] == 2
    equal(whole, w)
    same(f, figures)
    w = Spy(ReMax(group_size=N))
    w.begin([dataclasses.replace(t, reward=1 - t.reward) if t.sample_index == GREEDY else dataclasses.replace(t) for t in batch if t.group_id == 1], 1)
    same(f, figures := w.step(batch, 1))
    assert figures['begun_in_vain'] == 1
    equal(whole, w)


def test_groups_without_a_greedy_answer_are_refused():
    batch = [t for t in made() if t.sample_index != GREEDY]
    with pytest.raises(ConfigError, match='no greedy answer'): Spy(ReMax(group_size=N)).step(batch, 1)
