"Advantages and losses against the published formulas, computed here a second time, in NumPy float64"
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.learning.advantages import group_advantages
from laminar_sdk.learning.losses import SUMS, clipped_surrogate, finish, log_ratio, token_logprobs, token_mean, token_stats

LOW, HIGH = .2, .28
close = dict(rtol=1e-6, atol=1e-7)


def advantages_by_formula(rewards, groups, scale, eps=1e-6):
    out = np.zeros(len(rewards))
    for g in set(groups):
        at = [i for i, x in enumerate(groups) if x == g]
        r = np.array([rewards[i] for i in at], np.float64)
        if len(at) > 1 and len(set(r)) > 1: out[at] = (r - r.mean())/((r.std(ddof=1) + eps) if scale else 1)
    return out


@given(st.lists(st.tuples(st.sampled_from([0., 1., .1, -2.5, 1e6]), st.integers(-3, 3)), max_size=40), st.booleans())
def test_advantages_by_formula(rows, scale):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    ours = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64), scale=scale).numpy()
    np.testing.assert_allclose(ours, advantages_by_formula(rewards, groups, scale), rtol=1e-6, atol=1e-6)
    for g in set(groups): # nothing of one group reaches another
        at = np.array(groups) == g
        alone = group_advantages(torch.tensor(rewards, dtype=torch.float64)[at], torch.tensor(groups)[at], scale=scale).numpy()
        np.testing.assert_array_equal(ours[at], alone)


def tokens(seed, n=400, vocab=50, masked=.3):
    "Random logits, sampled ids, old log-probs some of which are far away, and a mask"
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n, vocab))
    ids, A, mask = rng.integers(0, vocab, n), rng.normal(0, 2, n), rng.random(n) > masked
    return logits, ids, A, mask, rng.normal(0, .3, n)


def logprobs_by_formula(logits, ids, tau):
    z = logits/tau
    return z[np.arange(len(ids)), ids] - (z.max(1) + np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)))


@pytest.mark.parametrize('tau', [1., .6, 2.])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_loss_gradient_and_figures_by_formula(tau, dtype):
    logits, ids, A, mask, drift = tokens(int(10*tau))
    logits = torch.tensor(logits).to(dtype).double().numpy() # the same inputs for both
    new = logprobs_by_formula(logits, ids, tau)
    old = np.where(mask, new - drift, np.nan) # there is none where the model did not generate
    ratio, n = np.exp(np.where(mask, drift, 0)), mask.sum()
    clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
    loss = -np.minimum(ratio*A, clipped*A)[mask].sum()/n
    live = mask & ~((ratio > 1 + HIGH) & (A > 0)) & ~((ratio < 1 - LOW) & (A < 0)) # tokens whose gradient is not cut
    grad = np.where(live, -ratio*A, 0)/n

    t = torch.tensor(logits, dtype=dtype, requires_grad=True)
    ours = token_logprobs(t, torch.tensor(ids), tau)
    ours.retain_grad()
    m, adv = torch.tensor(mask), torch.tensor(A, dtype=dtype)
    lr = log_ratio(ours, torch.tensor(old, dtype=dtype), m)
    total = token_mean(clipped_surrogate(lr, adv, LOW, HIGH), m)
    total.backward()
    loose = close if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-6) # old is float32 too: its rounding is in the ratio
    np.testing.assert_allclose(ours.detach(), new, rtol=1e-6, atol=2e-6 if dtype == torch.float32 else 1e-9)
    np.testing.assert_allclose(total.item(), loss, **loose)
    np.testing.assert_allclose(ours.grad, grad, **loose)
    p = np.exp(logits/tau - (logits/tau).max(1, keepdims=True)); p /= p.sum(1, keepdims=True)
    to_logits = grad[:, None]*(np.eye(50)[ids] - p)/tau # d log softmax(z/τ)
    np.testing.assert_allclose(t.grad, to_logits, **loose)

    got = finish(*token_stats(lr.detach(), ours.detach(), adv, m, LOW, HIGH))
    x, a, r = np.where(mask, drift, 0)[mask], A[mask], ratio[mask]
    expected = dict(clip_fraction_low=((r < 1 - LOW) & (a < 0)).mean(), clip_fraction_high=((r > 1 + HIGH) & (a > 0)).mean(), ratio_mean=r.mean(),
                    ratio_max=r.max(), kl_k1=-x.mean(), kl_k3=(r - 1 - x).mean(), entropy=-new[mask].mean(), tokens=n)
    assert got.keys() == expected.keys() == {*SUMS, 'ratio_max'}
    for name, value in expected.items(): np.testing.assert_allclose(got[name], value, err_msg=name, rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 399), max_size=6))
def test_micro_batches_add_up_however_they_are_cut(seed, cuts):
    logits, ids, A, mask, drift = tokens(seed, vocab=5)
    A, m, ids = torch.tensor(A), torch.tensor(mask), torch.tensor(ids)
    old = token_logprobs(torch.tensor(logits), ids) - torch.tensor(drift)

    def gradient(cuts):
        t, total, edges = torch.tensor(logits, requires_grad=True), 0., [0, *sorted(cuts), 400]
        for i, j in zip(edges, edges[1:]):
            lr = log_ratio(token_logprobs(t[i:j], ids[i:j]), old[i:j], m[i:j])
            loss = token_mean(clipped_surrogate(lr, A[i:j], LOW, HIGH), m[i:j], int(m.sum()))
            loss.backward()
            total += loss.item()
        return t.grad, total

    (whole, a), (parts, b) = gradient([]), gradient(cuts)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-15)
    assert abs(a - b) < 1e-12


def test_an_empty_mask_is_zero_with_a_gradient_of_zero():
    t = torch.randn(3, 4, 7, requires_grad=True)
    nothing, nan = torch.zeros(3, 4, dtype=torch.bool), torch.full((3, 4), float('nan'))
    lr = log_ratio(token_logprobs(t, torch.zeros(3, 4, dtype=torch.long)), nan, nothing)
    loss = token_mean(clipped_surrogate(lr, nan, LOW, HIGH), nothing)
    loss.backward()
    assert loss.item() == 0 and t.grad.abs().max() == 0
    assert all(v == 0 for v in finish(*token_stats(lr.detach(), nan, nan, nothing, LOW, HIGH)).values())
    none = torch.zeros(0)
    assert token_mean(none, none.bool()) == 0 and finish(*token_stats(none, none, none, none.bool(), LOW, HIGH))['tokens'] == 0


def test_a_ratio_beyond_float32_stays_finite():
    lr = log_ratio(torch.tensor([0., 0.]), torch.tensor([-200., 200.]), torch.tensor([True, True]))
    assert clipped_surrogate(lr, torch.tensor([-1., -1.]), LOW, HIGH).isfinite().all()
