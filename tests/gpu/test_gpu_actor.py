"The actor on a GPU: a bf16 step, exact rounding, agreement with fp32, the publish copy against a plain one, tokens/s against a bare loop"
import time

import numpy as np
import pytest
import torch

from laminar_sdk.bench_learn import bare_loop
from laminar_sdk.core.config import GRPO
from laminar_sdk.core.types import Trajectory
from laminar_sdk.learning.batching import balanced_microbatches
from laminar_sdk.learning.losses import token_logprobs
from laminar_sdk.training import actor
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.masters import Masters
from laminar_sdk.training.policy import Policy, random_policy
from laminar_sdk.training.step_batch import StepBatch

DEVICE, synchronize = 'cuda', torch.cuda.synchronize


def seconds(f, times=5):
    "Best of several, with the device idle before and after"
    best = float('inf')
    for _ in range(times):
        synchronize()
        t = time.perf_counter()
        f()
        synchronize()
        best = min(best, time.perf_counter() - t)
    return best


def qwen2(hidden=512, layers=8, vocab=4096) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    return Policy(Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=4*hidden, num_hidden_layers=layers,
                                               num_attention_heads=hidden//64, num_key_value_heads=hidden//128, max_position_embeddings=4096,
                                               tie_word_embeddings=True)))


def trajectories(vocab=4096, groups=32, size=8, median=200, longest=1500, seed=0):
    rng, made = np.random.default_rng(seed), []
    for i in range(groups*size):
        if i % size == 0: prompt = rng.integers(2, vocab, int(rng.integers(20, 80))).astype(np.int32)
        r = int(min(median/2*(1 + rng.pareto(1.3)), longest))
        made.append(Trajectory(id=i, group_id=i//size, prompt_id=i//size, sample_index=i % size, prompt_ids=prompt,
                               response_ids=rng.integers(2, vocab, r).astype(np.int32), loss_mask=np.ones(r, np.uint8), versions=[(0, 0)],
                               logprobs=np.full(r, -np.log(vocab), np.float32), reward=float(rng.random() < .5)))
    return made


def test_a_step_in_bf16_learns_and_rounds_exactly():
    w = ActorWorker(random_policy(), algorithm=GRPO(lr=1e-3), device=DEVICE)
    made = trajectories(vocab=19, groups=4, median=20, longest=60)
    before = [m.clone() for m in w.masters.masters]
    assert all(p.dtype == torch.bfloat16 for p in w.model.parameters()) and all(m.dtype == torch.float32 for m in w.masters.masters)
    for _ in range(3): metrics = w.step(made)
    assert metrics['updates'] == 1 and np.isfinite(metrics['loss']) and any(not torch.equal(a, b) for a, b in zip(before, w.masters.masters))
    named = dict(w.model.named_parameters())
    for (name, x), m in zip(w.published_tensors(), w.masters.masters):
        assert torch.equal(x, m.bfloat16()) and x.data_ptr() == named[name].data_ptr() and torch.equal(x.cpu(), m.cpu().bfloat16())


def test_shared_prompts_give_the_same_step(monkeypatch):
    made = trajectories(vocab=19, groups=4, median=20, longest=60)
    losses = []
    for saving in (0., 2.):
        monkeypatch.setattr(actor, 'SAVING', saving)
        w = ActorWorker(random_policy(hidden=128), algorithm=GRPO(lr=1e-6), device=DEVICE)
        losses.append(w.step(made))
    assert losses[0]['tokens_computed'] < losses[1]['tokens_computed']
    assert abs(losses[0]['loss'] - losses[1]['loss']) < .01 and abs(losses[0]['grad_norm']/losses[1]['grad_norm'] - 1) < .05


def test_buffers_stay_fp32():
    "Rotary frequencies in bf16 would be wrong by radians at long positions"
    w = ActorWorker(random_policy(), device=DEVICE)
    floating = [b for b in w.model.buffers() if b.is_floating_point()]
    assert floating and all(b.dtype == torch.float32 for b in floating)


def test_bf16_agrees_with_fp32_on_the_same_rounded_weights():
    gpu = ActorWorker(random_policy(hidden=128), device=DEVICE)
    exact = random_policy(hidden=128)
    Masters(exact.model) # rounds, keeps fp32 arithmetic
    batch = StepBatch.of(trajectories(vocab=19, groups=4, median=20, longest=60), GRPO(), None, 1., 0)
    x = batch.rectangle(list(range(8)))
    with torch.no_grad():
        reference = token_logprobs(actor.ResponseHead(exact.model)(x.input_ids, x.index_N), x.targets)
        gap = (gpu.logprobs(x.to(gpu.device)).cpu() - reference).abs()
    assert gap.mean() < .01 and gap.max() < .1


def test_fp32_sums_of_bf16_gradients():
    "A gradient taken in many micro-batches is that of one, to bf16's precision and not to sixteen roundings"
    def gradient(budget):
        w = ActorWorker(qwen2(hidden=256, layers=2), algorithm=GRPO(grad_clip=1e9), device=DEVICE)
        w.budget, grads = budget, []
        w._optimize = lambda: grads.extend(m.grad.clone() for m in w.masters.masters)
        w.step(made)
        return torch.cat([g.flatten() for g in grads])
    made = trajectories(groups=8)
    whole, parts = gradient(65_536), gradient(2_048)
    assert whole.dtype == torch.float32 and (whole - parts).norm() < .02*whole.norm()


def test_publish_stall_against_one_plain_copy(figures):
    "Device memory into pinned host memory: tensor by tensor as a publish does it, against one copy of as many bytes"
    w = ActorWorker(qwen2(hidden=1024, layers=12, vocab=32_768), device=DEVICE)
    named = dict(w.published_tensors())
    layout = w.layout()
    host = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
    plain_host, plain = torch.empty_like(host, pin_memory=True), torch.zeros(layout.nbytes, dtype=torch.uint8, device=DEVICE)
    views = {t.name: host[t.offset:t.end].view(getattr(torch, t.dtype)).view(t.shape) for t in layout.tensors}

    class Host:
        "As a relay's client does it, without a relay"
        def publish(self, version, tensors, step, incarnation):
            for name, x in tensors.items(): views[name].copy_(x, non_blocking=True)
            synchronize()

    publish_s = seconds(lambda: w.publish(Host(), 1))
    copy_s = seconds(lambda: plain_host.copy_(plain))
    figures.update(publish_s=publish_s, copy_s=copy_s, ratio=publish_s/copy_s, mbytes=layout.nbytes/1e6, tensors=len(named))
    assert all(torch.equal(views[n], x.cpu()) for n, x in named.items())
    assert publish_s < 1.5*copy_s + .005


def against_a_bare_loop(a, made, model=qwen2):
    "Tokens a second of the actor and of a plain loop over padded rectangles, in turns"
    w = ActorWorker(model(), algorithm=a, device=DEVICE, share_prompts=False)
    batch = StepBatch.of(made, w.algorithm, None, 1., 0)
    rows = batch.learn()
    cuts = [[rows[i] for i in cut] for cut in balanced_microbatches([batch.lengths_B[i] for i in rows], w.budget, actor.OVERHEAD_TOKENS[w.device.type])]
    bare = bare_loop(model().model.to(w.device, next(w.model.parameters()).dtype).eval(), made, cuts, batch.advantages_B, lr=1e-6)
    said, tokens = w.step(made), sum(batch.lengths_B[i] for i in rows)
    bare()
    ours, theirs = seconds(lambda: w.step(made), 3), seconds(bare, 3)
    return dict(actor_tokens_per_s=tokens/ours, bare_tokens_per_s=tokens/theirs, ratio=theirs/ours, padding_waste=said['padding_waste'], micro_batches=said['micro_batches'])


@pytest.mark.parametrize('padding_free', [None, False])
def test_tokens_per_second_against_a_bare_loop(padding_free, figures):
    figures.update(against_a_bare_loop(GRPO(lr=1e-6, padding_free=padding_free), trajectories()))
    assert figures['ratio'] >= .85
