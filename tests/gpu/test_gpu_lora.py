"Adapter versions: an actor on a GPU and a rollout on any processor have to make the same sums, to the bit"
import numpy as np
import pytest
import torch

from laminar_sdk.core.config import GRPO, LoRA
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.weights.adapter import BLOCK, byte_sum, merge, unpack
from test_gpu_actor import DEVICE, qwen2, seconds, trajectories


@pytest.mark.parametrize('stored, published', [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)])
def test_a_sum_has_the_bits_of_the_cpu(stored, published, figures):
    rng, shape = np.random.default_rng(0), (3000, 2048)
    W, A, B = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)*f) for s, f in ((shape, .05), ((16, shape[1]), .05), ((shape[0], 16), 1e-3)))
    W[0] *= 1e-38 # subnormal numbers too
    B[0] *= 1e-36
    W = W.to(stored)
    here = merge(W, A, B, 2., torch.empty(shape, dtype=published))
    there = [x.to(DEVICE) for x in (W, A, B)]
    out = torch.empty(shape, dtype=published, device=DEVICE)
    assert byte_sum(merge(*there, 2., out)) == byte_sum(here)
    BLOCK['cuda'], before = 1 << 16, BLOCK['cuda']
    assert byte_sum(merge(*there, 2., out)) == byte_sum(here)
    BLOCK['cuda'] = before
    figures.update(ns_an_element=1e9*seconds(lambda: merge(*there, 2., out), 5)/W.numel())


def test_what_an_actor_sends_is_what_it_computes_with():
    "From its folder's values and the image a CPU makes the GPU's parameters"
    pytest.importorskip('peft')
    policy = qwen2(hidden=256, layers=2)
    base = {n: p.detach().cpu().clone() for n, p in policy.model.named_parameters()}
    w = ActorWorker(policy, algorithm=GRPO(lr=1e-3), device=DEVICE, lora=LoRA(rank=8, targets='all-linear'))
    w.step(trajectories(groups=4))
    read = unpack({n: x.cpu() for n, x in w.masters.sent().items()})
    for n, x in w.published_tensors():
        if n in read.layers: assert torch.equal(merge(base[n].float(), *read.layers[n], read.about.scale, torch.empty_like(x, device='cpu')), x.cpu())
        else: assert torch.equal(base[n].to(x.dtype), x.cpu())
