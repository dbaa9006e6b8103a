"The code of tests/gpu on a CPU, at small sizes: what cannot run there is the device, not the check"
import importlib, sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent/'gpu'))


@pytest.fixture
def modules(monkeypatch):
    actor, learning = (importlib.import_module(f'test_gpu_{x}') for x in ('actor', 'learning'))
    for m in actor, learning: monkeypatch.setattr(m, 'DEVICE', 'cpu')
    monkeypatch.setattr(actor, 'synchronize', lambda: None)
    return actor, learning


def test_rewards_from_the_device(modules): modules[1].test_what_a_reward_model_on_the_gpu_says_is_a_number()


def test_rows_end_to_end_and_the_bare_loop(modules, figures):
    actor, learning = modules
    made, small = actor.trajectories(vocab=19, groups=3, size=4, median=12, longest=60), lambda: actor.random_policy(hidden=64)
    for how in dict(), dict(activation_checkpointing=True), dict(fp32_head=True):
        apart, loss, w = learning.end_to_end(how, made, model=small)
        assert apart < 1e-5 and loss < 1e-6 # fp32
    from laminar_sdk.core.config import GRPO
    figures.update(actor.against_a_bare_loop(GRPO(lr=1e-6, padding_free=True), made, small))
    assert figures['padding_waste'] == 0 and figures['ratio'] > .3 # a busy machine; the ratio that counts is measured by `laminar bench learn`
