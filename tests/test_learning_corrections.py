"Corrections, their figures, and DAPO's rules against the published formulas, in NumPy float64"
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.learning.advantages import group_advantages
from laminar_sdk.learning.corrections import (decoupled_surrogate, gap_figures, gap_sums, icepop_weights, interpolated_proximal, log_weights, masked_weights,
                                              staleness_weights, truncated_weights)
from laminar_sdk.learning.dapo import overlong_filter, overlong_penalty, uniform_groups

seeds = st.integers(0, 2**32 - 1)


def near(ours, formula, tol=1e-6):
    formula = np.asarray(formula, np.float64)
    assert torch.as_tensor(ours).isfinite().all()
    np.testing.assert_allclose(np.asarray(ours, np.float64), formula, rtol=tol, atol=tol*np.abs(formula).max(initial=1e-6))


def made(seed, B=4, T=9, spread=.6):
    "Log-probabilities of three policies, NaN where masked, rows of any kind; and what the tensors hold, in float64"
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0, .6, 1], (B, 1), p=[.2, .6, .2])
    new = np.where(mask, -rng.exponential(1.5, (B, T)), np.nan).astype(np.float32)
    x = [new, *((new + rng.normal(0, spread, (B, T))).astype(np.float32) for _ in range(2))]
    return [torch.tensor(v) for v in x], [v.astype(np.float64) for v in x], torch.tensor(mask), mask, rng


def weights_by_formula(gap, mask, level):
    out = np.zeros(gap.shape)
    for b in range(len(gap)):
        own, log_w = np.flatnonzero(mask[b]), gap[b][mask[b]]
        if level == 'sequence': log_w = np.full(len(own), log_w.sum())
        if level == 'geometric' and len(own): log_w = np.full(len(own), log_w.mean())
        out[b, own] = np.exp(np.clip(log_w, -20, 20))
    return out


@pytest.mark.parametrize('level', ['token', 'sequence', 'geometric'])
@settings(max_examples=50, deadline=None)
@given(seeds, st.sampled_from([.05, .6, 5.]))
def test_weights_by_formula(level, seed, spread):
    (new, old, _), _, m, mask, _ = made(seed, spread=spread)
    gap = new - old # NaN where masked
    w = weights_by_formula(gap.double().numpy(), mask, level)
    near(log_weights(gap, m, level).exp()*m, w)
    near(truncated_weights(gap, m, level, 1.5), np.minimum(w, 1.5))
    near(masked_weights(gap, m, level, .7, 1.5), np.where((w >= .7) & (w <= 1.5), w, 0))
    if level == 'token': near(icepop_weights(gap, m, .8, 3.), np.where((w >= .8) & (w <= 3.), w, 0))


def test_a_sequence_weight_keeps_its_digits_over_thousands_of_tokens():
    "Twenty thousand ratios that nearly cancel: a sum in float32 would be off in the fourth digit"
    gap = np.random.default_rng(0).normal(0, 3, (4, 20_000))
    gap = (gap - gap.mean(1, keepdims=True) + 5/20_000).astype(np.float32)
    w = truncated_weights(torch.tensor(gap), torch.ones(gap.shape).bool(), 'sequence', 1e8)
    near(w[:, 0], np.exp(gap.astype(np.float64).sum(1)))


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_decoupled_by_formula(seed):
    (new, prox, old), (n, p, o), m, mask, rng = made(seed)
    A = np.where(mask, rng.normal(0, 1, mask.shape), np.nan).astype(np.float32)
    new.requires_grad_(); prox.requires_grad_() # an anchor must not pull
    loss = decoupled_surrogate(new, prox, old, torch.tensor(A), m, .2, .28, 2.)
    grads = torch.autograd.grad(torch.where(m, loss, 0.).sum(), [new, prox], allow_unused=True, materialize_grads=True)
    r, w, A = np.exp(n - p)[mask], np.minimum(np.exp(p - o)[mask], 2.), A[mask].astype(np.float64)
    near(loss.detach()[m], -w*np.minimum(r*A, np.clip(r, .8, 1.28)*A))
    live = ~((A > 0) & (r > 1.28) | (A < 0) & (r < .8))
    near(grads[0][m], np.where(live, -w*r*A, 0))
    assert grads[0][~m].eq(0).all() and grads[1].eq(0).all()


@settings(max_examples=40, deadline=None)
@given(seeds, st.booleans())
def test_interpolation_and_age_by_formula(seed, by_row):
    (new, old, _), (n, o, _), m, mask, rng = made(seed)
    d = rng.integers(0, 6, len(mask) if by_row else mask.shape)
    D = np.broadcast_to(d[:, None] if by_row else d, mask.shape)
    alpha = np.array([[0 if x == 0 else 1/x for x in row] for row in D])
    near(interpolated_proximal(new, old, torch.tensor(d), m), np.where(mask, alpha*np.where(mask, o, 0) + (1 - alpha)*np.where(mask, n, 0), 0))
    near(staleness_weights(torch.tensor(d), m, .5), np.where(mask, 1/np.sqrt(np.maximum(D, 1)), 0))
    assert not interpolated_proximal(new.requires_grad_(), old, torch.tensor(d), m).requires_grad


@pytest.mark.parametrize('engine', [float('inf'), -float('inf'), float('nan'), -900.])
def test_figures_of_an_engine_that_is_broken_are_figures(engine):
    "They may be infinite or NaN, but telling them is no reason to end"
    new, old, mask = torch.full((2, 3), -1.), torch.full((2, 3), -1.).index_fill_(1, torch.tensor([1]), engine), torch.ones(2, 3).bool()
    assert all(isinstance(x, float) for x in gap_figures(gap_sums(new, old, mask)).values())


@pytest.mark.parametrize('level', ['token', 'sequence'])
@settings(max_examples=40, deadline=None)
@given(seeds, st.lists(st.integers(0, 4), max_size=3))
def test_figures_by_formula_and_in_micro_batches(level, seed, cuts):
    (new, old, _), (n, o, _), m, mask, _ = made(seed)
    edges = [0, *sorted(cuts), 4]
    got = gap_figures(sum(gap_sums(new[i:j], old[i:j], m[i:j], level, .5, 2.) for i, j in zip(edges, edges[1:])))
    if not mask.any(): assert all(v == 0 for v in got.values()); return
    x, w = (n - o)[mask], weights_by_formula(n - o, mask, level)[mask]
    ppl = np.exp(-o[mask].mean()), np.exp(-n[mask].mean())
    expected = dict(ess=w.sum()**2/(len(w)*(w**2).sum()), weight_mean=w.mean(), gap_k1=-x.mean(), gap_k3=(np.exp(x) - 1 - x).mean(), ppl_engine=ppl[0], ppl_trainer=ppl[1],
                    ppl_gap=ppl[1]/ppl[0] - 1, weight_clipped_low=(w < .5).mean(), weight_clipped_high=(w > 2).mean())
    assert got.keys() == expected.keys()
    for name, value in expected.items(): np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-9, err_msg=name)


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(1, 200), st.data())
def test_overlong_penalty_by_formula(lengths, limit, data):
    cache = data.draw(st.integers(1, limit))
    expected = [0 if n <= limit - cache else (limit - cache - n)/cache if n <= limit else -1 for n in lengths]
    near(overlong_penalty(torch.tensor(lengths), limit, cache), expected)


@given(st.lists(st.sampled_from(['stop', 'length', 'env_done', 'timeout', None]), max_size=8))
def test_only_the_reason_decides_what_is_cut_off(reasons):
    mask = torch.ones(len(reasons), 3).bool()
    assert overlong_filter(mask, reasons).any(1).tolist() == [r != 'length' for r in reasons]
    assert overlong_filter(mask, reasons, ['length', 'timeout']).any(1).tolist() == [r not in ('length', 'timeout') for r in reasons]


@given(st.lists(st.tuples(st.sampled_from([0., 1., .1, .3]), st.integers(-2, 4)), max_size=30))
def test_refilled_groups_are_those_without_a_gradient(rows):
    rewards, groups = torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows], dtype=torch.int64)
    A = group_advantages(rewards, groups)
    assert uniform_groups(rewards, groups) == sorted(g for g in set(groups.tolist()) if A[groups == g].eq(0).all())
    assert uniform_groups(rewards, groups) == sorted(g for g in set(groups.tolist()) if len({r for r, x in rows if x == g}) == 1)
