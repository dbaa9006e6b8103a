"A step leaves nothing behind: after thousands of them there are as many tensors and objects as after the first, and the process is as large"
import gc

import psutil
import pytest
import torch

from laminar_sdk.core.config import DAPO, GRPO, PPO, LoRA
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.policy import random_policy
from test_training_actor import one_thread, trajectories # noqa: F401

KINDS = dict(corrected=dict(algorithm=GRPO(old='actor', minibatches=2, corrections=['token_tis', 'staleness'], entropy=.01)),
             critic=dict(algorithm=PPO(group_size=4, kl=.1, kl_as='reward', reference='initial')),
             lora=dict(algorithm=DAPO(kl=.1, reference='initial'), lora=LoRA(rank=2)))


def there():
    "Live tensors, and all objects that the collector knows"
    gc.collect()
    found = gc.get_objects()
    return sum(issubclass(type(x), torch.Tensor) for x in found), len(found) # `isinstance` would wake what is imported lazily


def work(w, data, steps):
    "Steps; where the algorithm allows it, every other one is begun early, and some of these in vain; now and then the loss is NaN"
    from laminar_sdk.core.config import whole_step
    for i in range(steps):
        batch = data[i % len(data)]
        if i % 2 and not whole_step(w.algorithm): w.begin(batch[:4] if i % 3 else data[i % len(data) - 1][:4], i)
        was, batch[0].logprobs[0] = batch[0].logprobs[0], float('nan') if i % 7 == 6 else batch[0].logprobs[0]
        w.step(batch, i)
        batch[0].logprobs[0] = was


def worker(kind):
    w = ActorWorker(random_policy(), device='cpu', max_tokens=20, **KINDS[kind])
    w.version = 0
    return w, [trajectories(groups=2, seed=s, longest=12) for s in range(4)]


@pytest.mark.parametrize('kind', KINDS)
def test_steps_leave_no_object_behind(kind):
    w, data = worker(kind)
    work(w, data, 14)
    tensors, objects = there()
    work(w, data, 42)
    after = there()
    assert after[0] == tensors and after[1] - objects < 20, (tensors, objects, after)


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_two_thousand_steps_take_no_memory(kind, figures):
    w, data = worker(kind)
    def size():
        gc.collect()
        return psutil.Process().memory_info().rss/2**20
    work(w, data, 280)
    before = size()
    work(w, data, 2_002)
    figures['grown_mib'] = size() - before
    assert figures['grown_mib'] < 6 # 3 KB a step
