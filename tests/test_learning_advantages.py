"Advantages against the published formulas, computed here a second time, token by token, in NumPy float64"
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.core.errors import ConfigError
from laminar_sdk.learning.baselines import dr_grpo_advantages, remax_advantages, rloo_advantages
from laminar_sdk.learning.gae import gae, token_rewards
from laminar_sdk.learning.whitening import reinforce_pp_advantages, reinforce_pp_baseline_advantages, whiten

REWARDS = st.sampled_from([0., 1., .1, -2.5, 1e3])
ROWS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), max_size=24)


def near(ours, formula):
    "≤ 1e-6 relative to the value, or to the largest one where terms cancel"
    formula = np.asarray(formula, np.float64)
    assert ours.isfinite().all() and tuple(ours.shape) == formula.shape
    np.testing.assert_allclose(ours.double().numpy(), formula, rtol=1e-6, atol=1e-6*max(np.abs(formula).max(initial=0), 1e-6))


def group_rows(groups): return {g: [i for i, x in enumerate(groups) if x == g] for g in set(groups)}


@settings(max_examples=60)
@given(ROWS)
def test_group_baselines_by_formula(rows):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    mean, others = np.zeros(len(rows)), np.zeros(len(rows))
    for g, at in group_rows(groups).items():
        r = np.array([rewards[i] for i in at])
        if len(set(r)) == 1: continue # also a group of one: exactly 0
        for i in at:
            mean[i] = rewards[i] - r.mean()
            others[i] = rewards[i] - np.mean([rewards[j] for j in at if j != i])
    R, G = torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64)
    near(dr_grpo_advantages(R.double(), G), mean)
    near(rloo_advantages(R.double(), G), others)
    near(remax_advantages(R, R.flip(0)), R.double().numpy() - R.double().numpy()[::-1])


@st.composite
def answers(draw, rows=st.integers(0, 5), tokens=st.integers(0, 9)):
    "Token rewards, values, a mask with rows of any kind, among them empty ones; NaN where nobody may look"
    rng, B, T = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(rows), draw(tokens)
    mask = rng.random((B, T)) < rng.choice([0, .5, 1], (B, 1), p=[.2, .6, .2])
    rewards = np.where(rng.random((B, T)) < .4, rng.normal(0, 1, (B, T)), 0).astype(np.float32)
    return rewards, np.where(mask, rng.normal(0, 1, (B, T)), np.nan).astype(np.float32), mask, rng


def gae_by_formula(rewards, values, mask, gamma, lam, last):
    "The sum of the paper, over each row's own tokens, rewards on masked tokens moved to the token before"
    out = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        own = np.flatnonzero(mask[b])
        if not len(own): continue
        r = np.array([rewards[b, i:j].astype(np.float64).sum() for i, j in zip(own, [*own[1:], rewards.shape[1]])])
        v = np.append(values[b, own].astype(np.float64), last[b])
        delta = r + gamma*v[1:] - v[:-1]
        for k, t in enumerate(own): out[b, t] = sum((gamma*lam)**(m - k)*delta[m] for m in range(k, len(own)))
    return out


@settings(max_examples=80)
@given(answers(), st.sampled_from([1., .9, .5]), st.sampled_from([1., .95, 0.]), st.booleans())
def test_gae_by_formula(made, gamma, lam, cut_off):
    rewards, values, mask, rng = made
    last = rng.normal(0, 1, len(rewards)) if cut_off else np.zeros(len(rewards))
    ours = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), gamma, lam, torch.tensor(last) if cut_off else None)
    near(ours, gae_by_formula(rewards, values, mask, gamma, lam, last))


@settings(max_examples=40)
@given(answers(rows=st.integers(1, 4), tokens=st.integers(1, 6)), st.integers(1, 20))
def test_a_tools_tokens_are_no_time_steps(made, k):
    "However long it talks, and whatever stands there, the model's tokens have the same advantages"
    rewards, values, mask, rng = made
    at = int(rng.integers(0, rewards.shape[1] + 1))
    wider = lambda x, fill: torch.tensor(np.insert(x, [at]*k, fill, axis=1))
    short = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), .9, .8)
    long = gae(wider(rewards, 0.), wider(values, np.nan), wider(mask, False), .9, .8)
    assert torch.equal(long[wider(mask, False)], short[torch.tensor(mask)])


@given(answers())
def test_a_rows_reward_is_at_its_last_token(made):
    _, _, mask, rng = made
    rewards, placed = rng.normal(0, 1, len(mask)).astype(np.float32), np.zeros(mask.shape, np.float32)
    for b in range(len(mask)):
        if mask[b].any(): placed[b, np.flatnonzero(mask[b])[-1]] = rewards[b]
    np.testing.assert_array_equal(token_rewards(torch.tensor(rewards), torch.tensor(mask)).numpy(), placed)


def whitened(values, mask, eps=1e-6):
    x = [float(v) for v, m in zip(values.flat, mask.flat) if m]
    if len(set(x)) < 2: return np.zeros(values.shape)
    return np.where(mask, (values.astype(np.float64) - np.mean(x))/(np.std(x, ddof=1) + eps), 0)


@settings(max_examples=60)
@given(answers(), st.sampled_from([1., .9]))
def test_reinforce_pp_by_formula(made, gamma):
    rewards, values, mask, rng = made
    near(whiten(torch.tensor(values), torch.tensor(mask)), whitened(values, mask))
    returns = gae_by_formula(rewards, np.zeros_like(values), mask, gamma, 1., np.zeros(len(rewards)))
    near(reinforce_pp_advantages(torch.tensor(rewards), torch.tensor(mask), gamma), whitened(returns.astype(np.float32), mask))
    R, G = rng.choice([0., 1., .1], len(mask)), rng.integers(0, 3, len(mask))
    centred = np.zeros(len(mask))
    for at in group_rows(G.tolist()).values():
        if len(set(R[at])) > 1: centred[at] = R[at] - R[at].mean()
    ours = reinforce_pp_baseline_advantages(torch.tensor(R), torch.tensor(G), torch.tensor(mask))
    near(ours, whitened(np.broadcast_to(centred[:, None], mask.shape), mask))


@pytest.mark.parametrize('f', [dr_grpo_advantages, rloo_advantages])
def test_rewards_that_are_no_numbers_are_refused(f):
    for bad in (float('nan'), float('inf')):
        with pytest.raises(ConfigError, match='row 1'): f(torch.tensor([1., bad]), torch.tensor([0, 0]))
