"""Adapter versions in a real vLLM engine: bit for bit what the whole model would have given, in this engine and in a fresh one that was started from the merged folder"""
import asyncio, os, secrets, tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from laminar_sdk.core.config import GRPO, LoRA
from laminar_sdk.core.errors import IntegrityError
from laminar_sdk.rollout.engine import GenerationRequest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
PROMPTS = [5, 6, 7], [9], list(range(2, 19)) * 4


def base(folder: Path, seed: int):
    "A tiny Qwen2 whose fp32 weights are not on the bf16 grid: what engines compute with is nowhere in the folder"
    os.environ.setdefault('OMP_NUM_THREADS', '1') # before torch is loaded: then the engine may fork
    from laminar_sdk.training.policy import random_policy
    made = random_policy(hidden=64, layers=3, seed=seed)
    made.model.save_pretrained(folder), made.tokenizer.save_pretrained(folder)


def actor(folder, **lora):
    from laminar_sdk.training.actor import ActorWorker
    w = ActorWorker(folder, algorithm=GRPO(lr=1e-3), device='cpu', lora=LoRA(rank=4, targets='all-linear', **lora))
    learn(w, 0)
    return w


def learn(w, seed):
    "The additions move, as after some steps"
    import torch
    g = torch.Generator().manual_seed(seed)
    for m in w.masters.masters: m.add_(torch.randn(m.shape, generator=g)*.05)
    w.masters.round_()


async def started(folder):
    from laminar_sdk.rollout.vllm_engine import VLLMEngine
    engine = VLLMEngine(folder, max_model_len=256, max_num_seqs=32, kv_cache_bytes=32 << 20, seed=5)
    await engine.start()
    return engine


async def answers(engine):
    async def one(i, prompt):
        request = GenerationRequest(i, np.array(prompt, np.int32), 40, seed=i)
        chunks = [c async for c in engine.generate(request)]
        return np.concatenate([c.ids for c in chunks]).tolist(), np.concatenate([c.logprobs for c in chunks]).tolist()
    return [await one(i, p) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope='module')
def world():
    from laminar_sdk.weights.client import RelayClient
    from laminar_sdk.weights.relay import Relay
    with tempfile.TemporaryDirectory(prefix='lml-') as home:
        home, loop = Path(home), asyncio.new_event_loop()
        for n, seed in (('A', 1), ('B', 2)): base(home/n, seed)
        with Relay('here', home/'s', listen=None, secret=secrets.token_bytes(), keep=3) as relay, RelayClient(home/'s') as client:
            w = SimpleNamespace(home=home, loop=loop, socket=str(home/'s'), version=0, clients={}, engine=loop.run_until_complete(started(home/'A')))
            yield w
            loop.run_until_complete(w.engine.stop())
            for c in w.clients.values(): c.close()
            loop.close()


def run(w, coroutine): return w.loop.run_until_complete(asyncio.wait_for(coroutine, 90))

def publish(w, worker):
    from laminar_sdk.weights.client import RelayClient
    client = w.clients.setdefault(id(worker), RelayClient(w.socket))
    w.version += 1
    report = worker.publish(client, w.version)
    client.wait_for(w.version, 10)
    return report

def load(w, **how): return run(w, w.engine.load(w.version, w.socket, **how))


def test_adapters_give_what_whole_models_give(world, figures):
    "Five versions as adapters; the last one also as a whole model, and in a fresh engine started from the exported folder: the same tokens and log-probs, to the bit"
    import torch
    from laminar_sdk.training.checkpoint import save_model
    w = actor(str(world.home/'A'))
    seen = []
    for step in range(5):
        learn(w, step)
        report = publish(world, w)
        loaded = load(world)
        assert loaded.version == world.version and loaded.nbytes == w.layout().nbytes == report.nbytes
        seen.append(run(world, answers(world.engine)))
    assert len({str(s) for s in seen}) == 5
    whole = actor(str(world.home/'A'), publish='merged')
    for step in range(5): learn(whole, step)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(w.published_tensors(), whole.published_tensors()))
    big = publish(world, whole)
    load(world)
    assert run(world, answers(world.engine)) == seen[-1]
    publish(world, w)
    load(world) # and back: after a whole model the base is brought again
    assert run(world, answers(world.engine)) == seen[-1]
    async def fresh():
        engine = await started(save_model(w, world.home/'merged'))
        try: return await answers(engine)
        finally: await engine.stop()
    assert run(world, fresh()) == seen[-1]
    figures.update(adapter_bytes=report.nbytes, merged_bytes=big.nbytes)


def test_the_actor_computes_what_the_engine_computes(world, figures):
    import torch
    w = actor(str(world.home/'A'))
    publish(world, w), load(world)
    gap = 0.
    for prompt, (ids, logprobs) in zip(PROMPTS, run(world, answers(world.engine))):
        with torch.no_grad(): want = w.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1:-1].log_softmax(-1)[range(len(ids)), ids]
        gap = max(gap, float((want - torch.tensor(logprobs)).abs().max()))
    figures['logprob_gap_max'] = gap
    assert gap < 1e-4


def test_another_base_is_refused_and_the_engine_is_as_it_was(world):
    w, other = actor(str(world.home/'A')), actor(str(world.home/'B'))
    publish(world, w), load(world)
    before = run(world, answers(world.engine))
    publish(world, other)
    with pytest.raises(IntegrityError, match='base weights differ: tensor .model.embed_tokens.weight.'): load(world)
    assert run(world, answers(world.engine)) == before


def test_what_cannot_be_added_is_refused_and_the_next_is_taken(world):
    import torch
    w = actor(str(world.home/'A'))
    publish(world, w), load(world)
    good = w.masters.sent
    w.masters.sent = lambda: good() | {'adapter.sums': torch.full((len(w.masters.layers),), 4711)} # the actor computes with something else
    publish(world, w)
    with pytest.raises(IntegrityError, match='comes out otherwise here than in the actor'): load(world)
    w.masters.sent = good
    publish(world, w), load(world)
    run(world, answers(world.engine))


def test_an_adapter_under_a_running_answer(world):
    "`inflight`: the answer goes on with the new addition"
    w = actor(str(world.home/'A'))
    publish(world, w), load(world)
    async def go(switch):
        n, chunks = 0, []
        async for c in world.engine.generate(GenerationRequest(f'live{switch}', np.array([5, 6, 7], np.int32), 150, temperature=1., seed=4, endless=True)):
            chunks.append(c)
            n += len(c.ids)
            if switch and 16 <= n and world.version == had: world.version += 1; w.publish(world.clients[id(w)], world.version); await world.engine.load(world.version, world.socket, keep=True)
        return np.concatenate([c.ids for c in chunks]).tolist(), [c.version for c in chunks]
    had = world.version
    plain, _ = run(world, go(False))
    learn(w, 7)
    ids, versions = run(world, go(True))
    assert ids[:16] == plain[:16] and ids != plain and len(ids) == 150 and {had, had + 1} == {*versions}
