"Learning on a GPU: compiled layers, activations computed twice, log-probs in pieces, an fp32 head, reference and critic, each against the plain step"
import numpy as np
import pytest
import torch

from laminar_sdk.core.config import GRPO, PPO
from laminar_sdk.training.actor import ActorWorker
from test_gpu_actor import DEVICE, qwen2, seconds, trajectories


def step(a, made, model=lambda: qwen2(hidden=256, layers=4), **more):
    "A first step's figures and gradients"
    w = ActorWorker(model(), algorithm=a.model_copy(update=dict(grad_clip=1e9)), device=DEVICE, share_prompts=False, max_tokens=1500, **more)
    grads = []
    w._optimize = lambda: grads.extend(m.grad.flatten().clone() for m in w.masters.masters)
    return w.step(made), torch.cat(grads), w


@pytest.fixture(scope='module')
def made(): return trajectories(groups=8)

@pytest.fixture(scope='module')
def plain(made): return step(GRPO(padding_free=False), made)


def end_to_end(how, made, **more):
    "The step with rows end to end, and with padded rows: how far they are apart"
    (m, g, w), (n, h, _) = (step(GRPO(padding_free=packed, **how), made, **more) for packed in (True, False))
    assert w.packed and m['padding_waste'] == 0 < n['padding_waste']
    return float((g - h).norm()/h.norm()), abs(m['loss'] - n['loss']), w


@pytest.mark.parametrize('how', [dict(), dict(activation_checkpointing=True), dict(logits_mib=4, fp32_head=True)], ids=lambda how: '+'.join(how) or 'plain')
def test_rows_end_to_end_against_padded_rows(how, made, plain, figures):
    "The kernel that is told the bounds, in bf16"
    apart, loss, w = end_to_end(how, made)
    figures.update(apart=apart, seconds=seconds(lambda: w.step(made), 2), padded_s=seconds(lambda: plain[2].step(made), 2))
    assert apart < .03 and loss < .01


def test_what_a_reward_model_on_the_gpu_says_is_a_number():
    "In whatever precision, with or without a gradient, as one tensor or several"
    from laminar_sdk.rollout.rewards import validate
    x = torch.tensor([1., .5], dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    for given in (x, x.detach().half(), list(x), x[:, None].unbind(), (y for y in x)): assert validate(given, 2) == ([1., .5], {})


def test_rows_go_end_to_end_by_themselves(made):
    w = step(GRPO(), made)[2]
    assert w.packed == (DEVICE == 'cuda' and torch.cuda.get_device_capability() >= (8, 0))


def test_a_critic_reads_rows_end_to_end(made):
    said = [step(PPO(group_size=8, padding_free=packed), made)[0] for packed in (True, False)]
    assert said[0]['value_loss'] == pytest.approx(said[1]['value_loss'], rel=.02) and said[0]['loss'] == pytest.approx(said[1]['loss'], abs=.01)


@pytest.mark.parametrize('how', [dict(activation_checkpointing=True), dict(logits_mib=4), dict(logits_mib=4, fp32_head=True), dict(compile=True)], ids=lambda how: '+'.join(how))
def test_the_same_step_in_another_way(how, made, plain, figures):
    m, g, w = step(GRPO(padding_free=False, **how), made)
    apart = float((g - plain[1]).norm()/plain[1].norm())
    figures.update(apart=apart, seconds=seconds(lambda: w.step(made), 2), plain_s=seconds(lambda: plain[2].step(made), 2))
    assert apart < .03 and abs(m['loss'] - plain[0]['loss']) < .01 # bf16


def test_pieces_take_less_memory(made, figures):
    def most(a):
        w = step(a, made)[2]
        torch.cuda.reset_peak_memory_stats()
        w.step(made)
        return torch.cuda.max_memory_allocated()/2**20
    if DEVICE != 'cuda': pytest.skip('a GPU counts its memory')
    whole, pieces = most(GRPO(micro_tokens=65_536)), most(GRPO(micro_tokens=65_536, logits_mib=16))
    figures.update(whole_mib=whole, pieces_mib=pieces)
    assert pieces < .7*whole


def test_reference_and_critic(made):
    for offload in False, True:
        m, _, w = step(PPO(group_size=8, kl=.1, kl_as='reward', reference='initial', offload_reference=offload), made)
        assert m['updates'] == 1 and abs(m['reference_k3']) < 1e-6 and np.isfinite(m['value_loss'])
        assert {x.device.type for x in w.reference.weights} == {'cpu' if offload else DEVICE}
        assert all(p.dtype == torch.float32 for p in w.critic.named.values())
