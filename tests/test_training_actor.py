"The actor worker: log-probs position by position, gradients that do not depend on the cut, steps that spoil nothing, and its speed"
import dataclasses, time

import numpy as np
import pytest
import torch

from laminar_sdk.bench_learn import bare_loop
from laminar_sdk.core.config import GRPO
from laminar_sdk.core.types import Trajectory
from laminar_sdk.learning.batching import balanced_microbatches
from laminar_sdk.training import actor
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.policy import random_policy
from laminar_sdk.training.step_batch import Figures, StepBatch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trajectories(groups=6, size=4, seed=0, longest=40, version=0, tool=True):
    "Groups with a long tail of lengths, some with tool tokens in the middle; log-probs are a uniform policy's"
    rng, made = np.random.default_rng(seed), []
    for i in range(groups*size):
        if i % size == 0: prompt = rng.integers(2, 19, int(rng.integers(1, 8))).astype(np.int32)
        r = int(min(1 + 3*rng.pareto(1.2), longest))
        mask = np.ones(r, np.uint8)
        if tool and i % 5 == 0: mask[1:r - 1] = 0
        made.append(Trajectory(id=i, group_id=i//size, prompt_id=i//size, sample_index=i % size, prompt_ids=prompt,
                               response_ids=rng.integers(1, 19, r).astype(np.int32), loss_mask=mask, versions=[(0, version)],
                               logprobs=np.where(mask, np.log(1/19), np.nan).astype(np.float32), reward=float(rng.random() < .5)))
    return made


@pytest.fixture(params=['plain', 'shared'])
def reading(request, monkeypatch):
    "Both ways to read prompts: in each row, and once for all rows that begin with it"
    monkeypatch.setattr(actor, 'SAVING', 0. if request.param == 'shared' else 2.)
    return request.param


class Spy(ActorWorker):
    "Keeps the gradients of its last update"
    def _optimize(self):
        self.seen = torch.cat([m.grad.flatten().clone() for m in self.masters.masters])
        super()._optimize()


def spy(seed=3, **algorithm): return Spy(random_policy(seed=seed), algorithm=GRPO(**{'lr': 1e-3, 'grad_clip': 1e9} | algorithm), device='cpu')


def by_hand(worker, t, tau=1.):
    "Log-probs of each response token: one row, no padding, no shortcut"
    ids = torch.tensor([[*t.prompt_ids.tolist(), *t.response_ids.tolist()]])
    with torch.no_grad(): logp = (worker.model(ids).logits[0]/tau).log_softmax(-1)
    p = len(t.prompt_ids)
    return torch.stack([logp[p + j - 1, y] for j, y in enumerate(t.response_ids.tolist())])


def with_logprobs(worker, made, tau=1.):
    return [dataclasses.replace(t, logprobs=by_hand(worker, t, tau).numpy(), sampling=dict(temperature=tau)) for t in made]


@pytest.mark.parametrize('tau', [1., .7])
def test_logprobs_in_rectangles_are_those_of_single_rows(tau, reading):
    w, seen = spy(), []
    w.budget = 128
    made = with_logprobs(w, trajectories(), tau)
    batch = StepBatch.of(made, w.algorithm, 0, 1., 0)
    with torch.no_grad():
        for x, rows in w._rectangles(batch, list(range(len(made))), Figures()):
            assert (x.prefix is None) == (reading == 'plain') and (w.logprobs(x) - x.logprobs).abs().max() < 2e-6
            seen += rows
    assert sorted(seen) == list(range(len(made)))


def test_gradients_do_not_depend_on_the_cut(reading):
    made = trajectories()
    whole, small = spy(), spy()
    small.budget = 64 if reading == 'plain' else 32
    a, b = whole.step(made), small.step(made)
    assert b['micro_batches'] > 2*a['micro_batches'] and abs(a['loss'] - b['loss']) < 1e-6 and abs(a['grad_norm']/b['grad_norm'] - 1) < 1e-5
    assert (whole.seen - small.seen).norm() <= 1e-5*whole.seen.norm()
    assert a['kl_k3'] == pytest.approx(b['kl_k3'], rel=1e-5)


def test_the_gradient_is_that_of_the_formula(reading):
    "Token by token in float64 autograd, over rows one at a time"
    w, made = spy(), trajectories(seed=4)
    params = [p for p in w.model.parameters()]
    advantages = StepBatch.of(made, w.algorithm, 0, 1., 0).advantages_B
    n, total = sum(int(t.loss_mask.sum()) for t in made), 0.
    for t, A in zip(made, advantages.tolist()):
        ids, p = torch.tensor([[*t.prompt_ids.tolist(), *t.response_ids.tolist()]]), len(t.prompt_ids)
        logp = w.model(ids).logits[0].double().log_softmax(-1)
        for j, y in enumerate(t.response_ids.tolist()):
            if not t.loss_mask[j]: continue
            r = (logp[p + j - 1, y] - float(t.logprobs[j])).exp()
            total = total - torch.minimum(r*A, r.clamp(.8, 1.28)*A)/n
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, params)])
    metrics = w.step(made)
    assert metrics['loss'] == pytest.approx(total.item(), rel=1e-5) and (w.seen - expected).norm() <= 1e-5*expected.norm()


def test_a_model_with_a_sliding_window_reads_prompts_in_their_rows(monkeypatch):
    from transformers import MistralConfig, MistralForCausalLM
    from laminar_sdk.training.policy import Policy
    monkeypatch.setattr(actor, 'SAVING', 0.)
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(vocab_size=19, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                             num_key_value_heads=2, sliding_window=4))
    w = ActorWorker(Policy(model), device='cpu')
    w.version = 0
    assert w.step(with_logprobs(w, trajectories(tool=False)))['logprob_gap_max'] < 5e-6


def test_responses_of_one_token(reading):
    w = spy()
    made = trajectories(longest=1, tool=False)
    assert {len(t) for t in made} == {1}
    m = w.step(with_logprobs(w, made))
    assert m['updates'] == 1 and abs(m['ratio_max'] - 1) < 1e-5


def test_rows_without_a_signal_are_left_out_and_nothing_changes(monkeypatch):
    made = trajectories(seed=2)
    for t in made[:8]: t.reward = 1. # two groups of equals
    short, long = spy(), spy()
    a = short.step(made)
    monkeypatch.setattr(StepBatch, 'learn', lambda self: [i for i, n in enumerate(self.tokens_B) if n])
    b = long.step(made)
    assert a['rows_learned'] <= len(made) - 8 < b['rows_learned'] == len(made) and a['tokens_computed'] < b['tokens_computed']
    assert (short.seen - long.seen).norm() <= 1e-6*long.seen.norm() and a['loss'] == pytest.approx(b['loss'], abs=1e-6)


def test_model_holds_rounded_masters_after_every_step():
    w = spy(lr=1e-4)
    for s in range(3): w.step(trajectories(seed=s))
    for name, x in w.published_tensors():
        master = dict(zip(w.masters.names, w.masters.masters))[name]
        assert torch.equal(x, master.bfloat16()) and torch.equal(dict(w.model.named_parameters())[name], x.float())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in w.masters.masters)


def test_parts_and_epochs_and_the_two_meanings_of_old(reading):
    made = trajectories(groups=8, seed=5)
    for old in ('engine', 'actor'):
        w = spy(old=old, epochs=2, minibatches=4, lr=1e-4)
        m = w.step(made)
        assert m['updates'] == 8 == w.updates and m['tokens_learned'] <= 2*m['tokens']
        # made-up engine log-probs are far from the actor's; the actor's own of a few small updates ago are not
        assert (m['kl_k3'] < 1e-3) == (old == 'actor'), (old, m['kl_k3'])
    assert spy(old='actor').step(made)['ratio_max'] == 1 # one update: against itself, without a second pass
    assert set(map(len, spy(minibatches=3)._parts(StepBatch.of(made, GRPO(), 0, 1., 0)))) == {12, 8} # whole groups of 4


def test_the_gap_finds_a_wrong_temperature_and_only_looks_at_fresh_rows():
    w = spy(lr=1e-6)
    w.version = 3
    honest = with_logprobs(w, trajectories(version=3, tool=False))
    assert w.step(honest)['logprob_gap_max'] < 5e-6 and 'logprob_gap_max' not in w.step(trajectories(version=2))
    w = spy(lr=1e-6)
    w.version = 3
    wrong = [dataclasses.replace(t, sampling={}) for t in with_logprobs(w, trajectories(version=3, tool=False), tau=.5)]
    assert w.step(wrong)['logprob_gap_mean'] > .01


def test_on_policy_the_ratio_is_one():
    w = spy()
    m = w.step(with_logprobs(w, trajectories(tool=False)))
    assert abs(m['ratio_mean'] - 1) < 1e-6 and m['ratio_max'] < 1 + 1e-5 and m['kl_k3'] < 1e-9 and m['clip_fraction_low'] == m['clip_fraction_high'] == 0


@pytest.mark.parametrize('spoil', ['gradient', 'loss'])
def test_what_is_not_finite_moves_nothing(spoil):
    w, clean = spy(scale_by_std=False), spy(scale_by_std=False)
    made = trajectories(seed=7)
    w.step(made), clean.step(made)
    before, state = [m.clone() for m in w.masters.masters], [s['exp_avg'].clone() for s in w.optimizer.state.values()]
    bad = trajectories(seed=8)
    if spoil == 'loss': bad[0].logprobs[0] = np.nan
    else: # finite advantages, finite loss, a gradient beyond float32
        for t in bad: t.reward *= 3e38
    m = w.step(bad)
    assert m['skipped'] == 1 and m['updates'] == 0 and w.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, w.masters.masters)) and all(torch.equal(a, s['exp_avg']) for a, s in zip(state, w.optimizer.state.values()))
    w.step(trajectories(seed=9)), clean.step(trajectories(seed=9)) # and the step after it is as if nothing had been
    assert all(torch.equal(a, b) for a, b in zip(w.masters.masters, clean.masters.masters))


def test_rows_of_zero_tokens_or_only_tool_tokens_are_no_trouble(reading):
    made = trajectories(tool=False)
    empty, masked = np.zeros(0, np.int32), np.zeros(len(made[1]), np.uint8)
    made[0] = dataclasses.replace(made[0], response_ids=empty, logprobs=empty.astype(np.float32), loss_mask=empty.astype(np.uint8))
    made[1] = dataclasses.replace(made[1], loss_mask=masked, logprobs=np.full(len(masked), np.nan, np.float32))
    m = spy().step(made)
    assert m['updates'] == 1 and np.isfinite(m['loss']) and m['rows_learned'] <= len(made) - 2
    for t in made: t.loss_mask = np.zeros_like(t.loss_mask)
    assert spy().step(made)['updates'] == 0


def test_warm_up():
    w = spy(lr=1e-3, warmup_steps=4)
    assert [w.step(trajectories(seed=s))['lr'] for s in range(6)] == pytest.approx([.00025, .0005, .00075, .001, .001, .001])


def test_same_seed_same_weights_bit_for_bit():
    a, b = (spy(minibatches=2, epochs=2) for _ in range(2))
    for s in range(2): a.step(trajectories(seed=s)), b.step(trajectories(seed=s))
    assert all(torch.equal(x, y) for x, y in zip(a.masters.masters, b.masters.masters))


def cpu_s(f):
    t = time.process_time()
    f()
    return time.process_time() - t


def in_turns(f, g, times): # best of each
    return (min(x) for x in zip(*[(cpu_s(f), cpu_s(g)) for _ in range(times)]))


def test_speed_against_a_bare_loop(figures):
    "The same model, rows and micro-batches in a plain PyTorch loop without the SDK; CPU time, best of several, taken in turns"
    policy = lambda: random_policy(hidden=128, layers=4, heads=4)
    made = trajectories(groups=12, size=8, seed=1, longest=110, tool=False)
    w = ActorWorker(policy(), algorithm=GRPO(lr=1e-5), device='cpu', share_prompts=False)
    batch = StepBatch.of(made, w.algorithm, None, 1., 0)
    rows = batch.learn()
    cuts = [[rows[i] for i in cut] for cut in balanced_microbatches([batch.lengths_B[i] for i in rows], w.budget, actor.OVERHEAD_TOKENS['cpu'])]
    bare = bare_loop(policy().model.eval(), made, cuts, batch.advantages_B, lr=1e-5)
    w.step(made), bare()
    ours, theirs = in_turns(lambda: w.step(made), bare, 8)
    tokens = sum(batch.lengths_B[i] for i in rows)
    figures.update(actor_tokens_per_s=tokens/ours, bare_tokens_per_s=tokens/theirs, ratio=theirs/ours, actor_step_ms=ours*1e3, micro_batches=len(cuts))
    assert theirs/ours >= .85


def test_speed_of_shared_prompts(figures):
    "Prompts as long as the answers, groups of eight: the same step with and without reading each prompt once"
    rng, made = np.random.default_rng(0), trajectories(groups=3, size=8, longest=60, tool=False)
    for g in range(3):
        prompt = rng.integers(2, 19, 60).astype(np.int32)
        for t in made[8*g:8*g + 8]: t.prompt_ids = prompt
    shared, plain = (ActorWorker(random_policy(hidden=128), algorithm=GRPO(lr=1e-5), device='cpu', share_prompts=s) for s in (True, False))
    a, b = shared.step(made), plain.step(made)
    assert a['loss'] == pytest.approx(b['loss'], rel=1e-4) and a['tokens_computed'] < .6*b['tokens_computed']
    ours, theirs = in_turns(lambda: shared.step(made), lambda: plain.step(made), 4)
    figures.update(shared_ms=1e3*ours, plain_ms=1e3*theirs, ratio=theirs/ours)
    assert theirs/ours > 1.2


def test_published_into_a_real_relay_and_pulled():
    import secrets, tempfile
    from laminar_sdk.weights.client import RelayClient
    from laminar_sdk.weights.relay import Relay
    w = spy()
    with tempfile.TemporaryDirectory() as d, Relay('h0', f'{d}/r.sock', secret=secrets.token_bytes(32)) as relay:
        with RelayClient(relay.socket_path) as mine, RelayClient(relay.socket_path) as rollout:
            for version in range(3):
                report = w.publish(mine, version, step=version, incarnation=1)
                rollout.wait_for(version)
                with rollout.pull(version) as got:
                    got.verify()
                    pulled = {name: x.clone() for name, x in got.views().items()}
                assert pulled.keys() == dict(w.published_tensors()).keys() and report.nbytes == w.layout().nbytes and w.version == version
                assert all(torch.equal(x, pulled[name]) for name, x in w.published_tensors())
                w.step(trajectories(seed=version))


def test_what_was_told_is_context_and_nothing_else(reading):
    "Log-probs of told tokens are 0 and stand in no ratio, gap, count or gradient; their ids do"
    def after(logprob, other=0):
        made = trajectories(seed=5)
        for t in made:
            told = t.loss_mask == 0
            t.logprobs[told] = logprob
            t.response_ids[told] = (t.response_ids[told] + other - 1) % 18 + 1
        worker = spy()
        worker.version = 0
        figures = worker.step(made)
        return worker.seen, {k: v for k, v in figures.items() if 'second' not in k and k != 'tokens_per_s'}, sum(int(t.loss_mask.sum()) for t in made)
    (seen, figures, n), (same, again, _), (changed, _, _) = after(0.), after(-9.), after(0., other=3)
    assert torch.equal(seen, same) and figures == again and not torch.allclose(seen, changed)
    assert figures['tokens'] == n and figures['fresh_tokens'] == figures['tokens_learned'] <= n
