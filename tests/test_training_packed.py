"Rows end to end are the padded rows: log-probs, values, gradients and figures; nothing leaks from one row into another"
import pytest
import torch

from laminar_sdk.core.config import GRPO, GSPO, PPO
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.equal import Watched, sample
from laminar_sdk.training.packed import NAME
from laminar_sdk.training.policy import random_policy
from laminar_sdk.training.step_batch import StepBatch

WAYS = dict(plain=GRPO(group_size=4), checkpointed=GRPO(group_size=4, activation_checkpointing=True), head=GRPO(group_size=4, fp32_head=True),
            rows=GSPO(group_size=4, entropy=.01, kl=.1, reference='initial'), critic=PPO(group_size=4, kl=.1, kl_as='reward', reference='initial', epochs=2, minibatches=2))


def worker(a, packed, micro_tokens=16_384, cls=Watched, **more):
    return cls(random_policy(seed=3), algorithm=a.model_copy(update=dict(padding_free=packed, grad_clip=1e9)), device='cpu', micro_tokens=micro_tokens, share_prompts=False, **more)


def learned(w):
    "Gradients of the last update of two steps, and the last step's figures"
    for seed in range(2): said = w.step(sample(seed=seed))
    return torch.cat([g.flatten() for g in w.seen]), {k: v for k, v in said.items() if 'second' not in k and k not in ('tokens_per_s', 'micro_batches', 'padding_waste', 'tokens_computed')}, said


@pytest.mark.parametrize('micro_tokens', [64, 200, 16_384])
@pytest.mark.parametrize('way', WAYS)
def test_the_same_step(way, micro_tokens):
    (g, m, said), (h, n, waste) = (learned(worker(WAYS[way], packed, micro_tokens)) for packed in (True, False))
    assert (g - h).norm() <= 1e-5*h.norm()
    assert m.keys() == n.keys() and all(m[k] == pytest.approx(n[k], rel=1e-4, abs=1e-6) for k in m), {k: (m[k], n[k]) for k in m if m[k] != n[k]}
    assert said['padding_waste'] == 0 and said['tokens_computed'] == waste['tokens_computed'] and said['micro_batches'] <= waste['micro_batches']


def test_log_probs_in_chunks():
    w, made = worker(GRPO(group_size=4), True, cls=ActorWorker), sample()
    batch = StepBatch.of(made, w.algorithm, None, 1., 0)
    rows = batch.learn()
    x, y = batch.rectangle(rows, packed=True), batch.rectangle(rows)
    with torch.no_grad():
        want = w.logprobs(y)
        assert (w.logprobs(x) - want).abs().max() <= 1e-5*want.abs().max() and x.input_ids.shape == (1, sum(batch.lengths_B[i] for i in rows))
        w.in_pieces, w.pieces.rows = True, 7
        assert (w.logprobs(x) - want).abs().max() <= 1e-5*want.abs().max()


def test_nothing_leaks_from_one_row_into_another():
    "Other tokens in a row leave every other row's log-probs as they are, to the bit; and a row has no gradient with respect to another's inputs"
    w, made = worker(GRPO(group_size=4), True, cls=ActorWorker), sample()
    rows, seen = list(range(6)), []
    for other in range(2):
        batch = StepBatch.of(made, w.algorithm, None, 1., 0)
        with torch.no_grad(): seen.append(w.logprobs(batch.rectangle(rows, packed=True)).split([batch.counted_B[i] for i in rows]))
        made[2].response_ids = (made[2].response_ids + 5) % 17 + 1
        made[2].prompt_ids = (made[2].prompt_ids + 3) % 15 + 2
    assert all(torch.equal(a, b) == (i != 2) for i, (a, b) in enumerate(zip(*seen)))
    x, embedded = batch.rectangle(rows, packed=True), []
    w.model.get_input_embeddings().register_forward_hook(lambda m, args, out: embedded.append(out) or out.retain_grad())
    w.logprobs(x).split([batch.counted_B[i] for i in rows])[3].sum().backward()
    reached = embedded[0].grad[0].abs().sum(1)
    bounds = x.bounds.tolist()
    assert [bool(reached[a:b].any()) for a, b in zip(bounds, bounds[1:])] == [i == 3 for i in range(6)]


def test_what_does_not_fit_is_tried_in_smaller_pieces():
    w, inner = worker(GRPO(group_size=4), True), ActorWorker._backward
    def full(x, *args):
        if x.input_ids.numel() > 100: raise torch.OutOfMemoryError('CUDA out of memory')
        return inner(w, x, *args)
    w._backward = full
    said, want = w.step(sample()), worker(GRPO(group_size=4), False)
    want.step(sample())
    assert said['splits'] and torch.cat([(a - b).flatten() for a, b in zip(w.seen, want.seen)]).norm() <= 1e-5*torch.cat([b.flatten() for b in want.seen]).norm()


def test_what_a_device_does_without_a_word_and_what_is_kept(tmp_path):
    from laminar_sdk.training.checkpoint import save_model
    from laminar_sdk.training.policy import load_policy
    assert not worker(GRPO(), None).packed and worker(GRPO(), None).model.config._attn_implementation == 'sdpa'
    w = worker(GRPO(), True)
    assert w.packed and w.model.config._attn_implementation == NAME
    save_model(w, tmp_path)
    assert load_policy(tmp_path).model.config._attn_implementation == 'sdpa' and NAME not in (tmp_path/'config.json').read_text()


def test_a_model_whose_rows_would_see_each_other_is_refused():
    from transformers import MistralConfig, MistralForCausalLM
    from laminar_sdk.training.policy import Policy
    small = dict(vocab_size=19, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ConfigError, match='see each other'): ActorWorker(Policy(MistralForCausalLM(MistralConfig(**small, sliding_window=8))), algorithm=GRPO(padding_free=True), device='cpu')
