"Losses, KL, entropy, aggregations against the published formulas, value and gradient, in NumPy float64"
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from laminar_sdk.learning.aggregation import constant_mean, counts, sequence_mean_of_means, sequence_mean_of_sums, spread
from laminar_sdk.learning.entropy import entropy
from laminar_sdk.learning.kl import kl_estimate, kl_rewards
from laminar_sdk.learning.losses import clipped_surrogate, token_mean
from laminar_sdk.learning.trust_regions import binary_divergence, cispo, dppo, gspo
from laminar_sdk.learning.value import value_loss

DTYPES = [torch.float32, torch.float64]
seeds = st.integers(0, 2**32 - 1)


def near(ours, formula, dtype=torch.float32):
    "≤ 1e-6 relative in float32, to the value or, where terms cancel, to the largest; far below in float64"
    tol = 1e-6 if dtype == torch.float32 else 1e-12
    formula = np.asarray(formula, np.float64)
    np.testing.assert_allclose(ours.detach().double().numpy(), formula, rtol=tol, atol=tol*np.abs(formula).max(initial=1e-6))


def made(seed, dtype, B=4, T=7, spread=.5):
    "A rectangle of tokens; a row may be empty; NaN where masked. The arrays hold exactly what the tensors hold"
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0, .6, 1], (B, 1), p=[.2, .6, .2])
    x = dict(lr=rng.normal(0, spread, (B, T)), new=-rng.exponential(1.5, (B, T)), A=rng.normal(0, 1, (B, T))*(rng.random((B, T)) < .9))
    t = {k: torch.tensor(np.where(mask, v, 0 if k == 'lr' else np.nan), dtype=dtype) for k, v in x.items()}
    return t, {k: v.double().numpy() for k, v in t.items()}, torch.tensor(mask), mask


def differentiated(loss, mask, at):
    "Losses of the unmasked tokens, gradient of their sum"
    grad, = torch.autograd.grad(torch.where(mask, loss, 0.).sum(), at)
    assert grad.isfinite().all() and grad[~mask].eq(0).all()
    return loss[mask], grad[mask]


@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_dual_clip_by_formula(dtype, seed):
    t, n, m, mask = made(seed, dtype, spread=1.5)
    lr = t['lr'].requires_grad_()
    loss, grad = differentiated(clipped_surrogate(lr, t['A'].nan_to_num(), .2, .28, 3.), m, lr)
    expected, slope = [], []
    for r, A in zip(np.exp(n['lr'][mask]), n['A'][mask]):
        objective = min(r*A, min(max(r, .8), 1.28)*A)
        live = not (A > 0 and r > 1.28 or A < 0 and r < .8)
        if A < 0 and objective < 3*A: objective, live = 3*A, False
        expected.append(-objective); slope.append(-r*A if live else 0.)
    near(loss, expected, dtype); near(grad, slope, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from([.5, .01]))
def test_gspo_by_formula(dtype, seed, spread):
    t, n, m, mask = made(seed, dtype, spread=spread)
    low, high = (.2, .3) if spread == .5 else (3e-4, 4e-4)
    lr, A = t['lr'].requires_grad_(), t['A'][:, :1].nan_to_num(.7).expand(m.shape) # one advantage an answer, as the paper has it
    loss = gspo(lr, A, m, low, high)
    (grad,) = torch.autograd.grad(sequence_mean_of_means(loss, m), lr)
    a, expected, slope, S = A.double().numpy(), np.zeros(mask.shape), np.zeros(mask.shape), max(mask.any(1).sum(), 1)
    for b in np.flatnonzero(mask.any(1)):
        s = np.exp(n['lr'][b, mask[b]].mean())
        expected[b, mask[b]] = -min(s*a[b, 0], min(max(s, 1 - low), 1 + high)*a[b, 0]) # the answer's, at each of its tokens
        if not (a[b, 0] > 0 and s > 1 + high or a[b, 0] < 0 and s < 1 - low): slope[b, mask[b]] = -s*a[b, 0]/mask[b].sum()/S
    near(loss[m], expected[mask], dtype); near(grad, slope, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_cispo_by_formula(dtype, seed):
    t, n, m, mask = made(seed, dtype, spread=1.5)
    new = t['new'].requires_grad_()
    loss, grad = differentiated(cispo(t['lr'], new, t['A'], m, .5, 1.), m, new)
    weight = np.minimum(np.maximum(np.exp(n['lr'][mask]), .5), 2.)
    near(loss, -weight*n['A'][mask]*n['new'][mask], dtype); near(grad, -weight*n['A'][mask], dtype)


def coins(p, q, kind): # p: then, q: now
    if kind == 'tv': return abs(p - q)
    return p*np.log(p/q) + (1 - p)*np.log((1 - p)/(1 - q))


@pytest.mark.parametrize('kind, delta', [('tv', .1), ('kl', .02)])
@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=30, deadline=None)
@given(seeds)
def test_dppo_by_formula(dtype, kind, delta, seed):
    t, n, m, mask = made(seed, dtype)
    t['new'] = torch.where(m, torch.minimum(t['new'], t['lr'] - 1e-3).clamp(max=-1e-3), float('nan')) # both are probabilities below 1
    new = t['new'].double().numpy()[mask]
    lr = t['lr'].requires_grad_()
    loss, grad = differentiated(dppo(lr, t['new'], t['A'], m, delta, kind), m, lr)
    x, A = n['lr'][mask], n['A'][mask]
    D = np.array([coins(np.exp(q - d), np.exp(q), kind) for q, d in zip(new, x)])
    M = np.array([not (d > delta and (a > 0 and r > 0 or a < 0 and r < 0)) for d, a, r in zip(D, A, x)], float)
    near(loss, -M*np.exp(x)*A, dtype); near(grad, -M*np.exp(x)*A, dtype)
    near(binary_divergence(t['new'][m], t['new'][m].double() - t['lr'].detach()[m], kind), D)


def test_a_divergence_of_certain_tokens_is_a_number():
    lp = torch.tensor([0., -1e-8, -1e-3, -1., -30., -200.])
    for kind in ('tv', 'kl'):
        D = binary_divergence(lp[:, None].expand(6, 6), lp[None].expand(6, 6), kind)
        assert D.isfinite().all() and (D >= 0).all() and D.diagonal().eq(0).all()


@pytest.mark.parametrize('clip', [None, .3])
@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_value_loss_by_formula(dtype, clip, seed):
    t, n, m, mask = made(seed, dtype)
    V = t['A'].requires_grad_()
    loss, grad = differentiated(value_loss(V, t['new'], t['lr'] + t['new'], m, clip), m, V)
    v, old, R = n['A'][mask], n['new'][mask], (t['lr'] + t['new']).double().numpy()[mask]
    plain, expected, slope = (v - R)**2, [], []
    for i in range(len(v)):
        inside = clip is None or abs(v[i] - old[i]) <= clip
        clipped = plain[i] if inside else (old[i] + np.sign(v[i] - old[i])*clip - R[i])**2
        expected.append(max(plain[i], clipped)/2)
        slope.append(0. if clipped > plain[i] else v[i] - R[i])
    near(loss, expected, dtype); near(grad, slope, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32) | st.floats(-2**-10, 2**-10, width=32), max_size=20))
def test_kl_by_formula(dtype, xs):
    x = torch.tensor(xs, dtype=dtype, requires_grad=True)
    y = x.detach().double().numpy()
    for kind, value, slope in (('k1', y, np.ones_like(y)), ('k2', y**2/2, y), ('k3', np.expm1(-y) + y, -np.expm1(-y))):
        k = kl_estimate(x, kind)
        grad, = torch.autograd.grad(k.sum(), x)
        np.testing.assert_allclose(k.detach().double().numpy(), value, rtol=1e-6, atol=1e-22) # each for itself, however small
        np.testing.assert_allclose(grad.double().numpy(), slope, rtol=1e-6, atol=1e-15)
        np.testing.assert_allclose(kl_rewards(torch.ones_like(x), x, .1, kind).detach().double().numpy(), 1 - .1*value, rtol=1e-6, atol=1e-6) # of the reward, 1
        assert not kl_rewards(torch.ones_like(x), x, .1, kind).requires_grad


@pytest.mark.parametrize('dtype', DTYPES)
@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 9), st.sampled_from([1., .6, 2.]))
def test_entropy_by_formula(dtype, seed, chunk, tau):
    rng = np.random.default_rng(seed)
    z = torch.tensor(rng.normal(0, 2, (int(rng.integers(0, 7)), 11)), dtype=dtype, requires_grad=True)
    H = entropy(z, tau, chunk)
    grad, = torch.autograd.grad((H*torch.arange(1., len(z) + 1)).sum(), z)
    y = z.detach().double().numpy()/tau
    p = np.exp(y - y.max(1, keepdims=True)); p /= p.sum(1, keepdims=True)
    h = -(p*np.log(p)).sum(1)
    np.testing.assert_allclose(H.detach().double().numpy(), h, rtol=1e-6 if dtype == torch.float32 else 1e-11) # each for itself, decided or not
    near(grad, -p*(np.log(p) + h[:, None])/tau*np.arange(1, len(z) + 1)[:, None], dtype)


@pytest.mark.parametrize('gap', [5., 12., 25., 60.])
def test_entropy_of_the_nearly_decided_with_forbidden_words(gap):
    "Float32 digits are kept however small the entropy, and a word at −∞ is no word"
    z = torch.tensor([[gap, 0., -1., -float('inf')]], requires_grad=True)
    H = entropy(z)
    grad, = torch.autograd.grad(H.sum(), z)
    u = np.array([0, -gap, -1 - gap])
    s = np.exp(u[1:]).sum()
    h = np.log1p(s) - (np.exp(u)*u).sum()/(1 + s)
    slope = -np.exp(u)/(1 + s)*(u - np.log1p(s) + h)
    np.testing.assert_allclose(H.item(), h, rtol=5e-6)
    np.testing.assert_allclose(grad[0, :3].numpy(), slope, rtol=5e-6)
    assert grad[0, 3] == 0


def test_entropy_holds_one_chunk_and_not_the_whole():
    "A buffer of the logits' size would be a million numbers; a chunk is sixteen thousand. What the gradient remembers is the logits themselves"
    class Largest(TorchDispatchMode):
        seen = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if x.untyped_storage().data_ptr() not in known: self.seen = max(self.seen, x.numel())
            return out
    z, kept = torch.randn(256, 4096, requires_grad=True), []
    known = {z.untyped_storage().data_ptr()}
    with Largest() as largest, saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x): entropy(z, chunk=4)
    assert largest.seen == 4*4096
    assert {x.numel() for x in kept if x.untyped_storage().data_ptr() not in known} == {256}


AGGREGATE = dict(
    token_mean=(token_mean, 'tokens', lambda x, m, S, N: sum(x[b][m[b]].sum() for b in range(len(x)))/N),
    means=(sequence_mean_of_means, 'sequences', lambda x, m, S, N: sum(x[b][m[b]].mean() for b in range(len(x)) if m[b].any())/S),
    sums=(sequence_mean_of_sums, 'sequences', lambda x, m, S, N: sum(x[b][m[b]].sum() for b in range(len(x)))/S),
    constant=(lambda loss, mask, sequences=None: constant_mean(loss, mask, 12., sequences), 'sequences', lambda x, m, S, N: sum(x[b][m[b]].sum() for b in range(len(x)))/S/12))


@pytest.mark.parametrize('name', AGGREGATE)
@settings(max_examples=40, deadline=None)
@given(seeds, st.lists(st.integers(0, 6), max_size=4))
def test_aggregations_by_formula_and_in_micro_batches(name, seed, cuts):
    f, count, formula = AGGREGATE[name]
    t, n, m, mask = made(seed, torch.float32, B=6)
    loss, total = t['A'].requires_grad_(), counts(m)
    assert total == dict(tokens=mask.sum(), sequences=mask.any(1).sum())
    expected = formula(n['A'], mask, max(total['sequences'], 1), max(total['tokens'], 1))
    scale = formula(np.abs(n['A']), mask, max(total['sequences'], 1), max(total['tokens'], 1)) # terms cancel
    assert abs(f(loss, m).item() - expected) <= 1e-6*max(scale, 1e-6)
    whole, = torch.autograd.grad(f(loss, m), loss)
    parts, summed, edges = 0., torch.zeros_like(whole), [0, *sorted(cuts), 6]
    for i, j in zip(edges, edges[1:]):
        part = f(loss[i:j], m[i:j], **{count: total[count]})
        summed, parts = summed + torch.autograd.grad(part, loss)[0], parts + part.item()
    assert torch.equal(summed, whole) and abs(parts - expected) <= 1e-6*max(scale, 1e-6)
    assert whole.isfinite().all() and whole[~m].eq(0).all()


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_spread_is_the_inverse_of_the_mask(seed):
    t, _, m, _ = made(seed, torch.float32)
    flat = t['A'][m].requires_grad_()
    rows = spread(flat, m)
    assert torch.equal(rows[m], flat) and rows[~m].eq(0).all()
    assert torch.equal(torch.autograd.grad((rows**2).sum(), flat)[0], 2*flat)
