"The gradient of the actor, with every algorithm, against formulas that are written out here row by row; any micro-batch size gives the same"
import dataclasses, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from laminar_sdk.core.config import CISPO, DAPO, DPPO, GRPO, GSPO, PPO, RLOO, Algorithm, DrGRPO, ReinforcePP, ReinforcePPBaseline
from laminar_sdk.training import actor
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.policy import random_policy
from test_training_actor import one_thread, reading, trajectories # noqa: F401

VERSION, LIMIT = 5, 40 # the newest version; tokens of an answer


def groups(seed=0):
    "Answers of mixed versions, with engine log-probs around those of a uniform policy; some cut off, some with a tool's words in the middle"
    rng, made = np.random.default_rng(seed), trajectories(seed=seed, longest=LIMIT)
    for t in made:
        t.logprobs = (np.log(1/19) + .4*rng.standard_normal(len(t))).astype(np.float32)
        t.versions = [(0, int(rng.integers(2, 6)))]
        if len(t) > 6: t.versions.append((len(t)//2, 5))
        t.finish_reason = 'length' if t.id % 5 == 2 else 'stop' # some end of themselves with their last token, some are cut off earlier, where the context ends
        t.reward = float(rng.random() < .5) + .1*float(rng.integers(3))
    for t in made[4:8]: t.reward = .5 # a group of equals
    return made


class Spy(ActorWorker):
    "Keeps the gradients of its first update; it stands a little beside its reference, and its critic has an opinion"
    def __init__(self, algorithm, **more):
        super().__init__(random_policy(seed=3), algorithm=algorithm, device='cpu', max_tokens=LIMIT, steps=3, **more)
        self.version, noise = VERSION, torch.Generator().manual_seed(1)
        for m in self.masters.masters: m.add_(.02*torch.randn(m.shape, generator=noise))
        self.masters.round_()
        if self.critic:
            torch.nn.init.normal_(self.critic.head.weight, std=.3, generator=noise)
            self.critic.optimizer.step = lambda: setattr(self, 'seen_critic', torch.cat([p.grad.flatten().clone() for p in self.critic.named.values()]))

    def _optimize(self):
        self.seen = torch.cat([m.grad.flatten().clone() for m in self.masters.masters])


def read(w, t):
    "log π of a row's own tokens with a gradient, the entropy there, and the critic's value before each"
    ids, p, own = torch.tensor([[*t.prompt_ids.tolist(), *t.response_ids.tolist()]]), len(t.prompt_ids), torch.tensor(t.loss_mask) != 0
    logp = w.model(ids).logits[0, p - 1:-1].double().log_softmax(-1)
    values = None
    if w.critic: values = w.critic.head(w.critic.trunk(ids).last_hidden_state[0, p - 1:-1])[:, 0].double()[own]
    return logp.gather(1, torch.tensor(t.response_ids).long()[:, None])[own, 0], -(logp.exp()*logp).sum(-1)[own], values


def behind(t):
    "Versions between each own token's and the newest"
    of = np.zeros(len(t), int)
    for first, v in t.versions: of[first:] = VERSION - v
    return torch.tensor(of[t.loss_mask != 0])


def plain_advantages(a, made, rewards, away, values):
    "A list for each row"
    n, R = [int(t.loss_mask.sum()) for t in made], np.array(rewards, float)
    counts = [0 if a.overlong_filter and t.finish_reason == 'length' else k for t, k in zip(made, n)]
    if a.advantage in ('grpo', 'dr_grpo', 'rloo', 'reinforce_pp_baseline'):
        if away: R = R - a.kl*np.array([float(sum(x)) for x in away])
        A = []
        for i, t in enumerate(made):
            mates = np.array([R[j] for j, u in enumerate(made) if u.group_id == t.group_id])
            others = np.array([R[j] for j, u in enumerate(made) if u.group_id == t.group_id and j != i])
            x = R[i] - (others.mean() if a.advantage == 'rloo' else mates.mean())
            if a.advantage == 'grpo' and a.scale_by_std: x = x/(mates.std(ddof=1) + 1e-6) if np.ptp(mates) else 0.
            A.append(np.full(counts[i], x))
    else:
        lam, A = (a.lam if a.advantage == 'gae' else 1.), []
        for i, k in enumerate(counts):
            r, V, run, out = np.zeros(k), np.zeros(k) if values is None else values[i].detach().numpy(), 0., np.zeros(k)
            if k: r[-1] = R[i]
            if away: r -= a.kl*np.array([float(x) for x in away[i]])[:k]
            for s in reversed(range(k)):
                run = r[s] + a.gamma*(V[s + 1] if s + 1 < k else 0.) - V[s] + a.gamma*lam*run
                out[s] = run
            A.append(out)
    unscaled = A
    if a.advantage.startswith('reinforce') or a.whiten:
        flat = np.concatenate(A)
        A = [(x - flat.mean())/(flat.std(ddof=1) + 1e-6) for x in A]
    return [torch.tensor(x) for x in A], unscaled, counts


def k_of(x, kind): return dict(k1=x, k2=x**2/2, k3=torch.exp(-x) - 1 + x)[kind]


def expected(w, made, a):
    "The policy's loss and the critic's, as the papers have them"
    with torch.no_grad(), (w.reference.in_place() if w.reference else torch.no_grad()): ref = [read(w, t)[0] for t in made] if w.reference else None
    rows = [read(w, t) for t in made]
    rewards = [t.reward for t in made]
    if a.overlong:
        cache = round(a.overlong*LIMIT)
        rewards = [r + min(max(((LIMIT - cache) - int(t.loss_mask.sum()))/cache, -1), 0) for r, t in zip(rewards, made)]
    away = [k_of((x[0].detach() - y), a.kl_estimator) for x, y in zip(rows, ref)] if a.kl and a.kl_as == 'reward' else None
    A, unscaled, counts = plain_advantages(a, made, rewards, away, [x[2] for x in rows] if w.critic else None)
    tokens, sequences, total, critic = sum(counts), sum(n > 0 for n in counts), 0., 0.
    for i, t in enumerate(made):
        if not counts[i]: continue
        new, H, V = rows[i]
        mu, d = torch.tensor(t.logprobs[t.loss_mask != 0]).double(), behind(t)
        alpha = torch.where(d > 0, 1/d.clamp(min=1), 0.)
        prox = dict(engine=mu, actor=new.detach(), interpolated=alpha*mu + (1 - alpha)*new.detach())[a.old]
        x = new - prox
        if a.loss == 'gspo': x = x.mean() + 0*x
        r = x.exp()
        if a.loss in ('clipped', 'gspo', 'decoupled'): loss = -torch.minimum(r*A[i], r.clamp(1 - a.clip_low, 1 + a.clip_high)*A[i])
        if a.dual_clip: loss = torch.where(A[i] < 0, torch.minimum(loss, -a.dual_clip*A[i]), loss)
        if a.loss == 'decoupled': loss = (prox - mu).exp().clamp(max=a.proximal_cap)*loss
        if a.loss == 'cispo': loss = -r.detach().clamp(1 - a.clip_low, 1 + a.clip_high)*A[i]*new
        if a.loss.startswith('dppo'):
            p, q = new.detach().exp(), prox.exp()
            D = (p - q).abs() if a.loss == 'dppo_tv' else q*(q/p).log() + (1 - q)*((1 - q)/(1 - p)).log()
            loss = -torch.where((D > (a.delta or (.2 if a.loss == 'dppo_tv' else .05))) & ((r - 1)*A[i] > 0), 0., r*A[i])
        gap = prox - mu
        for name, o in a.corrections.items():
            level, kind = name.split('_') if '_' in name else ('token', name)
            g = dict(token=gap, sequence=gap.sum() + 0*gap, geometric=gap.mean() + 0*gap)[level].clamp(-20, 20).exp()
            low, high = o.get('low', dict(geometric=.5).get(level, .5 if name == 'icepop' else 0.)), o.get('high', 5. if name == 'icepop' else 2.)
            if kind == 'tis': g = g.clamp(max=high)
            elif kind == 'staleness': g = 1/d.clamp(min=1)**o.get('power', 1.)
            else: g = torch.where((g >= low) & (g <= high), g, 0.)
            loss = g*loss
        if a.kl and a.kl_as == 'loss': loss = loss + a.kl*k_of(new - ref[i], a.kl_estimator)
        loss = loss - a.entropy*H
        total = total + dict(token_mean=loss.sum()/tokens, sequence_mean_of_means=loss.mean()/sequences, sequence_mean_of_sums=loss.sum()/sequences,
                             constant_mean=loss.sum()/sequences/LIMIT)[a.aggregation]
        if w.critic: critic = critic + ((V - (torch.tensor(unscaled[i]) + V.detach()))**2/2).sum()/tokens
    return total, critic


NEAR, PROX = dict(reference='initial'), dict(old='actor')
CASES = dict(
    grpo=GRPO(), dual=GRPO(dual_clip=1.5), whitened=GRPO(whiten=True), dr_grpo=DrGRPO(), rloo=RLOO(), reinforce_pp=ReinforcePP(gamma=.97), baseline=ReinforcePPBaseline(),
    gspo=GSPO(), gspo_wide=GSPO(clip_low=.2, clip_high=.3), cispo=CISPO(), dppo=DPPO(), dppo_near=DPPO(delta=.02), dppo_kl=DPPO(loss='dppo_kl', delta=.002),
    dapo=DAPO(), dapo_filter=DAPO(overlong_filter=True), means=GRPO(aggregation='sequence_mean_of_means'), sums=GRPO(aggregation='sequence_mean_of_sums'),
    token_tis=GRPO(**PROX, corrections={'token_tis': {'high': 1.3}}), sequence_tis=GRPO(**PROX, corrections='sequence_tis'), token_mis=GRPO(**PROX, corrections='token_mis'),
    sequence_mis=GRPO(**PROX, corrections='sequence_mis'), geometric=GRPO(**PROX, corrections='geometric_mis'), icepop=GRPO(**PROX, corrections={'icepop': {'low': .8}}),
    two=GRPO(**PROX, corrections=['icepop', 'staleness']), staleness=GRPO(corrections={'staleness': {'power': .5}}), interpolated=GRPO(old='interpolated'),
    interpolated_tis=GRPO(old='interpolated', corrections='token_tis'), decoupled=GRPO(old='interpolated', loss='decoupled', proximal_cap=1.2), decoupled_actor=GRPO(**PROX, loss='decoupled'),
    kl3=GRPO(kl=.3, **NEAR), kl2=GRPO(kl=.3, kl_estimator='k2', **NEAR), kl_reward=GRPO(kl=.5, kl_as='reward', kl_estimator='k1', **NEAR),
    kl_reward_tokens=ReinforcePP(kl=.5, kl_as='reward', kl_estimator='k1', **NEAR), entropy=GRPO(entropy=.1), all_terms=GSPO(kl=.2, entropy=-.05, **NEAR),
    ppo=PPO(group_size=4), ppo_kl=PPO(group_size=4, kl=.1, kl_as='reward', kl_estimator='k3', **NEAR), pieces=GRPO(logits_mib=1, fp32_head=True), checkpointed=GRPO(activation_checkpointing=True))


@pytest.mark.parametrize('name', CASES)
def test_the_gradient_is_that_of_the_formula(name, reading):
    a, made = CASES[name].model_copy(update=dict(grad_clip=1e9)), groups()
    whole = Spy(a)
    loss, critic = expected(whole, made, a)
    params = list(whole.model.parameters())
    want = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(params, torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True))])
    if whole.critic: want_critic = torch.cat([g.flatten() for g in torch.autograd.grad(critic, list(whole.critic.model.parameters()))])
    for budget in (16_384, 64):
        w = Spy(a)
        w.budget = budget
        m = w.step(made)
        assert m['loss'] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7) and m['updates'] == 1
        assert (w.seen - want).norm() <= 1e-5*want.norm(), float((w.seen - want).norm()/want.norm())
        if w.critic: assert (w.seen_critic - want_critic).norm() <= 1e-5*want_critic.norm()
        assert all(np.isfinite(v) for v in m.values())
    assert name in ('kl_reward',) or want.norm() > 1e-4


def test_every_preset_is_among_the_cases():
    assert {type(a) for a in CASES.values()} == {GRPO, DrGRPO, RLOO, ReinforcePP, ReinforcePPBaseline, GSPO, CISPO, DPPO, DAPO, PPO}


@pytest.mark.parametrize('a', [GRPO(), DrGRPO(), RLOO(), ReinforcePP(), ReinforcePPBaseline(), GSPO(), CISPO(), DPPO(), DAPO(overlong_filter=True), PPO(),
                               GRPO(old='interpolated', corrections=['sequence_mis', 'staleness'], kl=.1, reference='initial', entropy=.01)], ids=lambda a: a.name)
def test_odd_batches_give_defined_figures_and_finite_weights(a, reading):
    "Groups of one, equal rewards, empty answers, answers of told tokens only, all cut off"
    def odd(kind):
        made = groups()
        empty = np.zeros(0, np.int32)
        for i, t in enumerate(made):
            if kind == 'ones': t.group_id = i
            if kind == 'equal': t.reward = 1.
            if kind == 'empty': made[i] = dataclasses.replace(t, response_ids=empty, logprobs=empty.astype(np.float32), loss_mask=empty.astype(np.uint8), versions=[])
            if kind == 'told': t.loss_mask = np.zeros_like(t.loss_mask)
            if kind == 'cut off': t.finish_reason = 'length'
        return made
    w = ActorWorker(random_policy(), algorithm=a, device='cpu', max_tokens=LIMIT)
    w.version = VERSION
    for kind in ('ones', 'equal', 'empty', 'told', 'cut off'):
        m = w.step(odd(kind))
        assert all(np.isfinite(v) for v in m.values()) and m['skipped'] == 0 and all(x.isfinite().all() for x in w.masters.masters), (kind, m)
        if kind in ('empty', 'told'): assert m['updates'] == 0 == m['rows_learned'] and m['loss'] == 0
        if kind == 'ones' and a.advantage == 'grpo' and not a.kl: assert m['updates'] == 0
        if kind == 'equal': assert m['uniform_groups'] == 6
    assert w.step(groups())['updates'] == 1


def test_several_updates_are_taken_against_the_proximal_policy_of_the_step():
    made = groups()
    for old in ('actor', 'interpolated'):
        w = ActorWorker(random_policy(seed=3), algorithm=GRPO(old=old, corrections='token_tis', epochs=2, minibatches=3, lr=1e-4), device='cpu')
        w.version = VERSION
        m = w.step(made)
        assert m['updates'] == 6 and 0 < m['ess'] < 1 and .8 < m['weight_mean'] <= 2 and m['weight_max'] <= 2 and m['gap_k3'] > .01
        assert (m['kl_k3'] < 1e-3) == (old == 'actor')


def test_the_figures_are_those_of_the_formulas():
    w, made = Spy(GRPO(old='actor', corrections={'token_mis': {'high': 1.5}}, reference='initial')), groups()
    rows = [i for i in range(len(made)) if not 4 <= i < 8 and made[i].loss_mask.any()]
    with torch.no_grad():
        new, mu = (torch.cat(x) for x in zip(*[(read(w, made[i])[0], torch.tensor(made[i].logprobs[made[i].loss_mask != 0]).double()) for i in rows]))
        with w.reference.in_place(): ref = torch.cat([read(w, made[i])[0] for i in rows])
    m, x = w.step(made), new - mu
    r = x.exp()
    want = dict(ess=float(r.sum()**2/(len(r)*(r**2).sum())), gap_k1=float(-x.mean()), gap_k3=float((r - 1 - x).mean()), entropy_sampled=float(-new.mean()),
                ppl_gap=float((-new.mean()).exp()/(-mu.mean()).exp() - 1), weight_zero=float((r > 1.5).double().mean()), weight_max=float(r[r <= 1.5].max()),
                weight_mean=float(torch.where(r > 1.5, 0., r).mean()), reference_k1=float((new - ref).mean()), reference_k3=float(((ref - new).exp() - 1 + new - ref).mean()))
    assert {k: m[k] for k in want} == pytest.approx(want, rel=1e-4) and m['uniform_groups'] == 1


def test_memory_that_does_not_suffice_is_asked_for_in_smaller_pieces(reading):
    "An allocator that gives up above a limit, in the forward or in the backward pass"
    from laminar_sdk.core.errors import ResourceError
    made, plain = groups(), Spy(GRPO())
    a = plain.step(made)

    class Small(Spy):
        most = 60 # padded tokens
        def _read(self, x):
            if x.input_ids.numel() > self.most: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate …')
            return super()._read(x)
    w = Small(GRPO())
    b = w.step(made)
    assert b['splits'] >= 1 and b['micro_batches'] > a['micro_batches'] and (w.seen - plain.seen).norm() <= 1e-5*plain.seen.norm()
    if reading == 'plain': assert b['tokens_computed'] == a['tokens_computed']
    assert 'splits' not in w.step(made) # it has learned its size
    w.most = 5
    with pytest.raises(ResourceError, match=r'one row of \d+ tokens|rows of'): w.step(made)
    w.most = 10**9
    assert w.step(made)['updates'] == 1 # nothing is left of the step that failed
    assert (w.seen - plain.seen).norm() <= 1e-5*plain.seen.norm()


def test_memory_that_ends_in_the_backward_pass_leaves_no_half_gradient(reading):
    made, plain = groups(), Spy(GRPO())
    plain.step(made)
    w, calls = Spy(GRPO()), []
    real = w.accelerator.backward

    def backward(loss):
        calls.append(1)
        real(loss)
        if len(calls) == 1: raise RuntimeError('[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9 bytes')
    w.accelerator.backward = backward
    try:
        assert w.step(made)['splits'] == 1 and (w.seen - plain.seen).norm() <= 1e-5*plain.seen.norm()
    finally: w.accelerator.backward = real


def test_an_error_that_is_not_of_memory_is_not_tried_again():
    w = Spy(GRPO())
    def broken(x): raise RuntimeError('shapes do not match')
    w._read = broken
    with pytest.raises(RuntimeError, match='shapes'): w.step(groups())


def test_what_was_not_finite_is_kept(tmp_path):
    import pyarrow.parquet as pq
    w = ActorWorker(random_policy(seed=3), algorithm=GRPO(), device='cpu', faults=tmp_path/'faults')
    made = groups()
    made[0].logprobs[0] = np.nan
    m = w.step(made, 7)
    assert m['skipped'] == m['saved'] == 1 and pq.read_table(tmp_path/'faults'/'step-000007.parquet').num_rows == len(made)
    assert 'saved' not in w.step(groups(), 8) and len(list((tmp_path/'faults').iterdir())) == 1


PAID = dict(kl_as='reward', kl=.1, reference='initial')

@pytest.mark.parametrize('a', [GRPO(), DrGRPO(), DAPO(), GSPO(), ReinforcePP(), ReinforcePPBaseline(), PPO(group_size=4)], ids=lambda a: a.name)
def test_a_finite_reward_beyond_float32_ends_no_run(a, tmp_path):
    "It is learned from, or the update is skipped and the batch kept; the next one is as good as ever"
    w = ActorWorker(random_policy(seed=3), algorithm=a, device='cpu', max_tokens=LIMIT, faults=tmp_path/'faults')
    made = groups()
    for t in made[::3]: t.reward = 1e39
    m = w.step(made, 5)
    assert m['updates'] + m['skipped'] == 1 and m['skipped'] == m.get('saved', 0) and m['uniform_groups'] == len([*range(0, len(made), 4)]) - len({t.group_id for t in made[::3]}) \
        and all(x.isfinite().all() for x in w.masters.masters)
    assert not w.critic or m['critic_skipped'] == 1 and all(x.isfinite().all() for x in w.critic.named.values())
    assert w.step(groups())['updates'] == 1


@pytest.mark.parametrize('a', [GRPO(**PAID), ReinforcePP(**PAID), PPO(group_size=4, **PAID)], ids=lambda a: a.name)
def test_a_reference_that_says_nan_costs_an_update_and_not_the_actor(a, tmp_path):
    w, bad = ActorWorker(random_policy(seed=3), algorithm=a, device='cpu', faults=tmp_path/'faults'), [True]
    inner = w._referred
    w._referred = lambda batch, rows: {i: x*torch.nan if i == rows[0] and bad else x for i, x in inner(batch, rows).items()}
    before, m = [x.clone() for x in w.masters.masters], w.step(groups(), 2)
    assert (m['updates'], m['skipped'], m['saved']) == (0, 1, 1) and all(torch.equal(x, y) for x, y in zip(before, w.masters.masters))
    bad.clear()
    assert w.step(groups())['updates'] == 1


def test_schedules_are_those_of_transformers():
    from transformers import get_scheduler
    for kind in ('linear', 'cosine', 'constant'):
        w = ActorWorker(random_policy(), algorithm=GRPO(lr=1e-3, lr_schedule=kind, warmup_steps=3, minibatches=2), device='cpu', steps=6)
        o = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
        s = get_scheduler('constant_with_warmup' if kind == 'constant' else kind, o, num_warmup_steps=3, num_training_steps=12)
        ours, theirs = [], []
        w.optimizer.step = lambda: ours.append(w.optimizer.param_groups[0]['lr'])
        for _ in range(6): w.step(groups())
        for _ in range(12):
            o.step(), s.step()
            theirs.append(s.get_last_lr()[0])
        assert ours == pytest.approx(theirs, abs=1e-12)
    from laminar_sdk.core.errors import ConfigError
    with pytest.raises(ConfigError, match='end'): ActorWorker(random_policy(), algorithm=GRPO(lr_schedule='linear', warmup_steps=0), device='cpu')


def test_the_budget_of_logits_holds(monkeypatch):
    "No [tokens, vocabulary] tensor of the head is larger than the budget, forwards and backwards, in a micro-batch that is much larger"
    from torch.utils._python_dispatch import TorchDispatchMode
    monkeypatch.setattr(actor, 'LOGITS_BYTES', dict(cpu=8*19*4)) # a budget of eight rows

    class Watch(TorchDispatchMode):
        largest = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-1] == 19 and x.shape[0] != 32: self.largest = max(self.largest, x.nbytes)
            return out
    w, whole = Spy(GRPO()), Spy(GRPO())
    w.budget = whole.budget = 16_384
    whole.pieces.rows = 10**6
    with Watch() as seen: w.step(groups())
    with Watch() as before: whole.step(groups())
    assert seen.largest <= 8*19*4 < before.largest and (w.seen - whole.seen).norm() <= 1e-5*whole.seen.norm()


def test_a_critic_waits_for_nobody_and_the_policy_for_the_critic():
    w = ActorWorker(random_policy(), algorithm=PPO(group_size=4, critic_warmup=2, critic_lr=1e-3, lr=1e-4), device='cpu')
    made, before = groups(), [m.clone() for m in w.masters.masters]
    said = [w.step(made) for _ in range(3)]
    assert [m['updates'] for m in said] == [0, 0, 1] and w.critic.updates == 3 and said[2]['value_loss'] < said[0]['value_loss']
    assert any(not torch.equal(a, b) for a, b in zip(before, w.masters.masters))


def test_a_critic_that_is_not_finite_is_no_secret(tmp_path):
    "Nothing but the critic is hurt: in its warm-up nobody else moves; later one of two updates"
    import math
    def worker(**more): return ActorWorker(random_policy(), algorithm=PPO(group_size=4, critic_lr=1e-3, lr=1e-4, **more), device='cpu', faults=tmp_path/'faults')
    w = worker(critic_warmup=2)
    w.critic.head.weight.data.fill_(math.nan)
    m = w.step(groups(), 3)
    assert (m['skipped'], m['updates'], m['critic_skipped'], m['critic_updates'], m['saved']) == (0, 0, 1, 0, 1) and (tmp_path/'faults'/'step-000003.parquet').exists()
    w, calls = worker(minibatches=2), []
    w.critic.head.weight.register_hook(lambda g: g*(math.nan if calls.append(1) or len(calls) == 1 else 1.)) # in the first micro-batch
    m = w.step(groups(), 4)
    assert (m['skipped'], m['updates'], m['critic_skipped'], m['critic_updates'], m['saved']) == (0, 2, 1, 1, 1)
    assert all(x.isfinite().all() for x in w.critic.named.values())


def test_the_warm_up_of_a_critic_goes_on_where_it_was(tmp_path):
    from laminar_sdk.training.checkpoint import load, save
    def worker(): return ActorWorker(random_policy(), algorithm=PPO(group_size=4, critic_warmup=3, critic_lr=1e-3, lr=1e-4, minibatches=2), device='cpu')
    a, b = worker(), worker()
    for seed in range(2): a.step(groups(seed))
    load(save(tmp_path, a, 2), b)
    said = [[w.step(groups(seed))['updates'] for seed in range(2, 5)] for w in (a, b)]
    assert said == [[0, 2, 2]]*2 and all(torch.equal(x, y) for x, y in zip(a.masters.masters, b.masters.masters))


def test_a_checkpoint_keeps_the_critic(tmp_path):
    from laminar_sdk.core.errors import ConfigError
    from laminar_sdk.training.checkpoint import load, save
    def worker(a=PPO(group_size=4, lr=1e-4, critic_lr=1e-3, kl=.1, kl_as='reward', reference='initial')): return ActorWorker(random_policy(), algorithm=a, device='cpu')
    a, b = worker(), worker()
    for seed in range(2): a.step(groups(seed))
    load(save(tmp_path, a, 2), b)
    said = [w.step(groups(5)) for w in (a, b)]
    assert said[0]['value_loss'] == said[1]['value_loss'] and all(torch.equal(x, y) for x, y in zip(a.masters.masters, b.masters.masters))
    assert all(torch.equal(p, q) for p, q in zip(a.critic.named.values(), b.critic.named.values())) and b.critic.updates == 3
    plain = worker(GRPO())
    with pytest.raises(ConfigError, match='no critic'): load(save(tmp_path/'plain', plain, 1), worker())


SHARED = dict(ppo=PPO(group_size=4, kl=.1, kl_as='reward', reference='initial', epochs=2, minibatches=2, lr=1e-3, critic_lr=1e-3, grad_clip=1e9),
              kl_reward=GRPO(kl=.5, kl_as='reward', kl_estimator='k1', reference='initial', old='actor', minibatches=2, corrections='sequence_tis', grad_clip=1e9),
              gspo=GSPO(entropy=.01, kl=.1, reference='initial', old='interpolated', corrections='staleness', grad_clip=1e9), whitened=ReinforcePPBaseline(overlong_filter=True, grad_clip=1e9))


def student(name, ranks):
    w = Spy(SHARED[name], ranks=ranks, micro_tokens=64)
    w._optimize = lambda: ActorWorker._optimize(w)
    if w.critic: del w.critic.optimizer.step
    w.optimizer = torch.optim.SGD(w.masters.masters, lr=.02)
    return w


def learned(w):
    "Two steps: the masters, and the last step's figures"
    for seed in range(2): m = w.step(groups(seed))
    return torch.cat([x.flatten() for x in w.masters.masters]), {k: v for k, v in m.items() if 'second' not in k and k not in ('tokens_per_s', 'micro_batches', 'padding_waste', 'tokens_computed')}


class Table:
    "Where ranks meet that are threads of one process: what each puts down, all see"
    def __init__(self, size): self.size, self.mine, self.put, self.barrier = size, threading.local(), [None]*size, threading.Barrier(size, timeout=60)

    def all(self, x):
        self.put[self.mine.rank] = x.clone()
        self.barrier.wait()
        seen = [x.clone() for x in self.put]
        self.barrier.wait()
        return seen

    def all_gather(self, got, x):
        for g, y in zip(got, self.all(x), strict=True): g.copy_(y)

    def all_reduce(self, x, op=torch.distributed.ReduceOp.SUM, async_op=False):
        assert op == torch.distributed.ReduceOp.SUM
        x.copy_(torch.stack(self.all(x)).sum(0))
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize('name', SHARED)
def test_two_ranks_judge_and_learn_as_one(name, monkeypatch):
    "Values, distances from the reference, whitening and counts are of the whole step on each rank"
    from laminar_sdk.training.ranks import Alone, Ranks
    table = Table(2)
    for f in 'all_gather', 'all_reduce': monkeypatch.setattr(torch.distributed, f, getattr(table, f))
    both = [student(name, Ranks(r, 2)) for r in range(2)]
    def work(rank):
        table.mine.rank = rank
        try: return learned(both[rank])
        except BaseException: table.barrier.abort(); raise
    with ThreadPoolExecutor(2) as pool: (a, m), (b, _) = pool.map(work, range(2))
    one, figures = learned(student(name, Alone()))
    assert torch.equal(a, b) and (a - one).norm() <= 1e-6*one.norm()
    assert m.keys() == figures.keys() and all(m[k] == pytest.approx(figures[k], rel=1e-3, abs=1e-6) for k in m), (m, figures)


def test_the_names_of_the_config_are_those_of_the_catalogue():
    from typing import get_args
    from laminar_sdk.core.config import CLIPS, OPTIONS
    from laminar_sdk.learning.catalogue import ADVANTAGES, AGGREGATIONS, CORRECTIONS, LOSSES
    names = lambda field: set(get_args(Algorithm.model_fields[field].annotation))
    assert names('advantage') == set(ADVANTAGES) and names('aggregation') == set(AGGREGATIONS)
    assert names('loss') == set(LOSSES) - {'dual_clip'} and set(OPTIONS) == set(CORRECTIONS) - {'interpolated_proximal'}
    assert {c: set(o) for c, o in OPTIONS.items()} == {c: set(CORRECTIONS[c].options) for c in OPTIONS}
    for loss, (low, high) in CLIPS.items(): assert (low, high) == tuple(LOSSES[loss].options[k] for k in ('clip_low', 'clip_high'))


def test_the_gap_is_the_same_figure_whatever_the_ratio_is_taken_against():
    said = [Spy(GRPO(old=old, loss=loss)).step(groups()) for old, loss in (('engine', 'clipped'), ('actor', 'clipped'), ('engine', 'gspo'))]
    for m in said[1:]: assert {k: m[k] for k in ('ess', 'gap_k1', 'gap_k3', 'ppl_gap')} == pytest.approx({k: said[0][k] for k in ('ess', 'gap_k1', 'gap_k3', 'ppl_gap')}, rel=1e-5)


@pytest.mark.parametrize('a', [PPO(group_size=4, kl=.1, kl_as='reward', reference='initial', lr=1e-3), GRPO(kl=.1, reference='initial', entropy=.01, lr=1e-3, logits_mib=1)], ids=lambda a: a.name)
def test_additions_of_low_rank_learn_with_reference_and_critic(a):
    from laminar_sdk.core.config import LoRA
    w = ActorWorker(random_policy(), algorithm=a, device='cpu', lora=LoRA(rank=2))
    said = [w.step(groups(seed)) for seed in range(3)]
    assert [m['updates'] for m in said] == [1, 1, 1] and abs(said[0]['reference_k3']) < 1e-9 < said[2]['reference_k3']


@pytest.mark.long
@pytest.mark.parametrize('preset', [GRPO, DrGRPO, RLOO, ReinforcePP, ReinforcePPBaseline, GSPO, CISPO, DPPO, DAPO, PPO])
def test_every_preset_learns_a_toy_task(preset, figures):
    "Answer with the prompt's first symbol, thrice: from one in nineteen to nearly always"
    w, said = ActorWorker(random_policy(), algorithm=preset(lr=1e-2, **(dict(critic_lr=1e-2) if preset is PPO else {})), device='cpu', max_tokens=10, seed=0), []
    for step in range(40):
        w.version, made = step, []
        for g in range(8):
            prompt, logps = [2 + (5*step + g) % 4, 12], []
            ids = torch.tensor([prompt]*8)
            for _ in range(3):
                with torch.no_grad(): logp = w.model(ids, use_cache=False).logits[:, -1].log_softmax(-1)
                drawn = logp.exp().multinomial(1)
                ids, logps = torch.cat([ids, drawn], 1), [*logps, logp.gather(1, drawn)]
            made += [actor.Trajectory(id=8*g + i, group_id=g, prompt_id=g, sample_index=i, prompt_ids=np.array(prompt, np.int32), response_ids=row[2:].numpy().astype(np.int32),
                                      logprobs=lp.numpy(), loss_mask=np.ones(3, np.uint8), versions=[(0, step)], finish_reason='stop', reward=float((row[2:] == prompt[0]).double().mean()))
                     for i, (row, lp) in enumerate(zip(ids, torch.cat(logps, 1)))]
        said.append(w.step(made)['reward'])
    figures.update(before=np.mean(said[:3]), after=np.mean(said[-3:]))
    assert np.mean(said[:3]) < .2 < .9 < np.mean(said[-3:])
