"""The vLLM engine, for real: one engine for the whole file, loads there and back, and its death at the end.
The reference is transformers on the same, rounded weights: it shares no line with the engine."""
import asyncio, os, secrets, signal, subprocess, sys, tempfile, time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from laminar_sdk.core.config import Sampling
from laminar_sdk.core.errors import IntegrityError, MissingError, RunError
from laminar_sdk.core.events import WaveStarted
from laminar_sdk.rollout.engine import Engine, EngineDead, GenerationRequest, RequestRefused
from laminar_sdk.rollout.worker import Assignment, RolloutWorker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
EOS, VOCAB, LIMIT, LONG = 1, 20, 256, list(range(2, 20)) * 5 # LONG: 90 tokens, two whole cache blocks


def tiny(folder: Path, seed: int):
    "A random Qwen2 of the demo's size, tied head, fp32 weights on the bf16 grid"
    os.environ.setdefault('OMP_NUM_THREADS', '1') # before torch is loaded: then the engine may fork
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=LIMIT, tie_word_embeddings=True, eos_token_id=EOS, pad_token_id=0,
                         bos_token_id=None, initializer_range=.15)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for p in model.parameters(): p.copy_(p.bfloat16())
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope='module')
def world():
    "An engine started from model A, a relay, and the models A and B"
    from laminar_sdk.weights.client import RelayClient
    from laminar_sdk.weights.relay import Relay
    with tempfile.TemporaryDirectory(prefix='lmr-') as home:
        home, loop = Path(home), asyncio.new_event_loop()
        a, b = (tiny(home/n, seed) for seed, n in enumerate('AB'))
        from laminar_sdk.rollout.vllm_engine import VLLMEngine
        engine = VLLMEngine(home/'A', max_model_len=LIMIT, max_num_seqs=64, kv_cache_bytes=64 << 20, seed=5)
        with Relay('here', home/'s', listen=None, secret=secrets.token_bytes(), keep=3) as relay:
            began = time.perf_counter()
            loop.run_until_complete(engine.start())
            w = SimpleNamespace(a=a, b=b, engine=engine, loop=loop, socket=str(home/'s'), version=0, started_s=time.perf_counter() - began,
                                client=RelayClient(home/'s', publish_dtype='bfloat16'), relay=relay, holds=None)
            yield w
            loop.run_until_complete(engine.stop())
            loop.close()
            w.client.close()


def run(w, coroutine): return w.loop.run_until_complete(asyncio.wait_for(coroutine, 240))

def publish(w, named, client=None):
    w.version += 1
    (client or w.client).publish(w.version, named)
    w.client.wait_for(w.version, 60)
    return w.version

def hold(w, model):
    "The engine holds this model's weights, taken from the relay"
    if w.holds is not model:
        report = run(w, w.engine.load(publish(w, dict(model.named_parameters())), w.socket))
        assert (report.version, report.checksum_ok, report.emulated) == (w.version, True, False)
        w.holds = model

def ask(w, prompt, max_tokens=30, id=1, **sampling):
    request = GenerationRequest(id, np.array(prompt, np.int32), max_tokens, **sampling)
    async def go():
        chunks = [c async for c in w.engine.generate(request)]
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        return SimpleNamespace(ids=np.concatenate([c.ids for c in chunks]).tolist(), logprobs=np.concatenate([c.logprobs for c in chunks]),
                               finish=chunks[-1].finish_reason, chunks=len(chunks))
    return go()

def reference(model, prompt, ids, temperature=1.):
    "[T, vocabulary] log-probabilities before each generated token"
    import torch
    with torch.no_grad(): logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1:-1]
    return (logits / temperature).log_softmax(-1)

def check(model, prompt, answer, temperature=1., tolerance=1e-3):
    want = reference(model, prompt, answer.ids, temperature)[range(len(answer.ids)), answer.ids].numpy()
    assert len(answer.ids) == len(answer.logprobs) and np.abs(want - answer.logprobs).max() <= tolerance
    return np.abs(want - answer.logprobs).max()


def test_start(world, figures):
    assert isinstance(world.engine, Engine) and not world.engine.emulated and world.engine.eos_ids == (EOS,)
    assert len(world.engine.pids()) == 1 and world.engine.stats().kv_tokens > 1000
    figures |= world.engine.seconds | dict(method=world.engine.start_method)


def test_a_first_load_that_fails_leaves_no_engine_that_generates(world):
    "Half a model was written: nothing may be generated until a whole one is there. Needs an engine that never loaded: stands first"
    from laminar_sdk.weights.client import RelayClient
    if world.version: pytest.skip('the engine has loaded before')
    missing = {n: p for n, p in world.b.named_parameters() if n != 'model.layers.2.self_attn.v_proj.weight'}
    with RelayClient(world.socket, publish_dtype='bfloat16') as client: publish(world, missing, client)
    with pytest.raises(IntegrityError, match=r"layers\.2\.self_attn\.qkv_proj\.weight"): run(world, world.engine.load(None, world.socket))
    with pytest.raises(RunError, match='no whole version'): run(world, ask(world, [5]))
    hold(world, world.a)
    check(world.a, [5, 6], run(world, ask(world, [5, 6])))


def test_loads_are_exact_there_and_back(world, figures):
    "Greedy tokens and log-probabilities are those of transformers; the tied head follows; back at A nothing differs by a bit"
    def answers(model):
        hold(world, model)
        return [run(world, ask(world, p, temperature=0.)) for p in ([5, 6, 7], [9], LONG)]
    first, other, again = answers(world.a), answers(world.b), answers(world.a)
    figures['max_difference'] = max(check(m, p, a) for m, some in ((world.a, first), (world.b, other))
                                    for p, a in zip(([5, 6, 7], [9], LONG), some))
    for model, some in (world.a, first), (world.b, other):
        for p, a in zip(([5, 6, 7], [9], LONG), some):
            want = reference(model, p, a.ids)
            assert (want.max(-1).values.numpy() - want[range(len(a.ids)), a.ids].numpy()).max() < 1e-4 # greedy
    assert [(a.ids, a.finish) for a in first] == [(a.ids, a.finish) for a in again]
    assert all((x.logprobs == y.logprobs).all() for x, y in zip(first, again))
    assert [a.logprobs.tolist() for a in first] != [a.logprobs.tolist() for a in other]


def test_the_prefix_cache_ends_with_its_weights(world):
    from vllm import SamplingParams
    hold(world, world.a)
    async def cached():
        prompt = dict(type='token', prompt_token_ids=LONG)
        async for out in world.engine.llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), 'probe'): last = out
        return last.num_cached_tokens
    run(world, cached())
    assert run(world, cached()) == 64 # the control: at one version it is used
    hold(world, world.b)
    assert run(world, cached()) == 0
    check(world.b, LONG, run(world, ask(world, LONG)))


def test_a_publish_of_another_model_is_refused_and_nothing_is_touched(world):
    import torch
    from laminar_sdk.weights.client import RelayClient
    hold(world, world.a)
    before = run(world, ask(world, [5, 6, 7], temperature=0.))
    name = 'model.layers.1.mlp.up_proj.weight'
    good = dict(world.b.named_parameters())
    for bad, said in (({**good, name: torch.zeros(7, 128)}, name), ({**good, 'model.extra.weight': torch.zeros(3)}, 'model.extra.weight'),
                      ({n: p for n, p in good.items() if n != name}, name)):
        with RelayClient(world.socket, publish_dtype='bfloat16') as client: publish(world, bad, client)
        with pytest.raises(IntegrityError, match=said.replace('.', r'\.')): run(world, world.engine.load(None, world.socket))
        after = run(world, ask(world, [5, 6, 7], temperature=0.))
        assert after.ids == before.ids and (after.logprobs == before.logprobs).all()


def test_a_version_that_is_not_there(world):
    hold(world, world.a)
    with pytest.raises(RunError, match='version 4711 is not on this host'): run(world, world.engine.load(4711, world.socket))
    with pytest.raises(RunError, match='no relay answers'): run(world, world.engine.load(1, world.socket + 'x'))
    check(world.a, [5], run(world, ask(world, [5])))


def test_sampling_logprobs_are_those_of_the_sampling_distribution(world):
    hold(world, world.a)
    for i in range(3): check(world.a, [5, 6], run(world, ask(world, [5, 6], seed=i, temperature=.6)), temperature=.6)
    a = run(world, ask(world, [5, 6], seed=3, top_p=.8, stop_token_ids=()))
    logp = reference(world.a, [5, 6], a.ids)
    for row, id, got in zip(logp, a.ids, a.logprobs): # renormalised over the nucleus
        ps, order = row.exp().sort(descending=True)
        inside = order[:int((ps.cumsum(0) < .8).sum()) + 1]
        assert id in inside.tolist() and abs(float(row[id] - row[inside].logsumexp(0)) - got) < 1e-3


def test_seeds_hold_whatever_else_runs(world):
    hold(world, world.a)
    alone = run(world, ask(world, [5, 6, 7], seed=11))
    async def crowd(): return await asyncio.gather(*(ask(world, [5, 6, 7], id=i, seed=10 + i) for i in range(12)))
    many = run(world, crowd())
    assert many[1].ids == alone.ids and len({tuple(a.ids) for a in many}) > 6


def test_the_token_that_ends_a_response_is_in_it(world):
    "EOS and stop ids: in the ids, with a log-probability; the reason is the engine's"
    hold(world, world.a)
    async def crowd(**kw): return await asyncio.gather(*(ask(world, [5, 6], id=i, seed=i, max_tokens=60, **kw) for i in range(24)))
    for kw, ends in (({}, {EOS}), (dict(stop_token_ids=(7, 8)), {EOS, 7, 8})):
        answers = run(world, crowd(**kw))
        assert {a.finish for a in answers} == {'stop'} | ({'length'} if any(a.finish == 'length' for a in answers) else set())
        for a in answers:
            check(world.a, [5, 6], a)
            assert (a.finish == 'stop') == (a.ids[-1] in ends) and not set(a.ids[:-1]) & ends
        assert {a.ids[-1] for a in answers if a.finish == 'stop'} == ends


def test_lengths(world):
    "The budget, the model's length, and a prompt that leaves no room"
    hold(world, world.a)
    eos, world.engine.eos_ids = world.engine.eos_ids, ()
    try:
        a, b = run(world, ask(world, [5, 6], 17)), run(world, ask(world, LONG, 10_000))
        assert (len(a.ids), a.finish) == (17, 'length') and (len(b.ids), b.finish) == (LIMIT - len(LONG), 'length')
    finally: world.engine.eos_ids = eos
    with pytest.raises(RequestRefused, match='leave no room'): run(world, ask(world, LONG * 3))
    with pytest.raises(RequestRefused): run(world, ask(world, [5], 0))
    with pytest.raises(RequestRefused): run(world, ask(world, [5, VOCAB])) # an id that the model does not have
    with pytest.raises(RequestRefused): run(world, ask(world, []))


def test_more_seeded_prompts_at_once_than_one_step_takes(world):
    "vLLM would prefill the last of them in chunks, and die of its seed: no generator of a CPU has an offset"
    hold(world, world.a)
    async def go(): return await asyncio.gather(*(ask(world, [i // 15 + 3, i % 15 + 3]*45, 4, id=i, seed=i) for i in range(64)))
    answers = world.loop.run_until_complete(go())
    assert len(answers) == 64 and all(a.ids for a in answers)


def test_abort(world):
    hold(world, world.a)
    async def go():
        answers = [asyncio.create_task(ask(world, [5], 200, id=i, seed=i, stop_token_ids=())) for i in range(4)]
        while not world.engine.stats().running: await asyncio.sleep(.005)
        await asyncio.gather(*(world.engine.abort(i) for i in range(4)), world.engine.abort('nobody'))
        answers = await asyncio.gather(*answers)
        return [a.finish for a in answers], [len(a.ids) == len(a.logprobs) for a in answers]
    eos, world.engine.eos_ids = world.engine.eos_ids, ()
    try: reasons, whole = run(world, go())
    finally: world.engine.eos_ids = eos
    assert reasons == ['abort'] * 4 and all(whole)
    check(world.a, [5], run(world, ask(world, [5])))
    assert world.engine.stats().kv_used == 0


def test_a_load_ends_what_is_in_flight(world):
    hold(world, world.a)
    world.holds = None
    async def go():
        answer = asyncio.create_task(ask(world, LONG, 160))
        while not world.engine.stats().running: await asyncio.sleep(.005)
        report = await world.engine.load(publish(world, dict(world.b.named_parameters())), world.socket)
        return (await answer).finish, report.version
    eos, world.engine.eos_ids = world.engine.eos_ids, ()
    try: assert run(world, go()) == ('abort', world.version)
    finally: world.engine.eos_ids = eos
    check(world.b, LONG, run(world, ask(world, LONG)))


def test_its_knees_are_measured(world):
    "B and C_max in a few seconds, and nothing of the probe is left; an answer that no token ends has its whole length"
    from laminar_sdk.rollout.knee import ROOM, clock_of, probe, step_s
    batch, kv_max = run(world, probe(world.engine))
    assert 1 <= batch <= 64 and 0 < kv_max <= ROOM and world.engine.stats().kv_used == 0, (batch, kv_max)
    clock = clock_of(world.engine)
    assert clock is not time.perf_counter, 'an engine on this CPU is timed by what it computes'
    def least(n): return min(run(world, step_s(world.engine, clock, n)) for _ in range(3))
    assert least(1) < least(64), 'sixty-four in a step take longer than one'
    endless = run(world, ask(world, [5], 100, endless=True))
    assert (len(endless.ids), endless.finish) == (100, 'length')


def test_a_worker_on_a_real_engine(world):
    "Two waves, two versions, pulled in between; what arrives is what transformers computes"
    reports = []
    async def keep(report): reports.append(report)
    async def go():
        worker = RolloutWorker(3, world.engine, keep, interval_s=.02, seed=1)
        worker.tasks = [asyncio.create_task(worker._guard(t)) for t in (worker._main(), worker._reports())] # the engine is up already
        first = publish(world, dict(world.a.named_parameters()))
        second = publish(world, dict(world.b.named_parameters()))
        for n, v in enumerate((first, second)):
            await worker.wave(n, v, world.socket, [Assignment(10 * n + i, 1, np.array([5, i + 2], np.int32), Sampling(max_tokens=40)) for i in range(6)])
            while sum(p.finish is not None for r in reports for p in r.pieces) < 6 * (n + 1): await asyncio.sleep(.02)
        for t in worker.tasks: t.cancel()
        return first, second
    versions = run(world, go())
    world.holds = None
    assert [e for r in reports for e in r.events if isinstance(e, WaveStarted)] == [
        WaveStarted(3, n, v, e.pull_s) for n, (v, e) in enumerate(zip(versions, [e for r in reports for e in r.events]))]
    for n, (v, model) in enumerate(zip(versions, (world.a, world.b))):
        for i in range(6):
            pieces = [(r.version, p) for r in reports for p in r.pieces if p.trajectory == 10 * n + i]
            ids = np.concatenate([np.frombuffer(p.ids, np.int32) for _, p in pieces]).tolist()
            logprobs = np.concatenate([np.frombuffer(p.logprobs, np.float32) for _, p in pieces])
            assert {w for w, _ in pieces} == {v} and pieces[-1][1].finish in ('stop', 'length')
            check(model, [5, i + 2], SimpleNamespace(ids=ids, logprobs=logprobs))


def resumed(w, prompt, had, max_tokens, id, **sampling):
    "The rest of an answer, after the tokens that it has"
    request = GenerationRequest(id, np.array([*prompt, *had], np.int32), max_tokens - len(had), generated=len(had), **sampling)
    async def go():
        chunks = [c async for c in w.engine.generate(request)]
        return [*had, *np.concatenate([c.ids for c in chunks]).tolist()], np.concatenate([c.logprobs for c in chunks])
    return go()


def test_a_greedy_answer_that_moved_is_the_one_that_did_not(world, figures):
    "Aborted at every length and taken up again from its tokens: the same ids, and log-probs as near as arithmetic allows; near-ties are counted"
    hold(world, world.a)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in (3, 5, 9, 12, 20, 31, 33, 40, 64, 70)]
    whole = [run(world, ask(world, p, 60, id=900 + i, temperature=0.)) for i, p in enumerate(prompts)]
    moves, ties, gap = 0, 0, 0.
    for i, (p, a) in enumerate(zip(prompts, whole)):
        for k in {1, 2, 7, 31, 32, 33, len(a.ids) - 1} & set(range(1, len(a.ids))):
            ids, logprobs = run(world, resumed(world, p, a.ids[:k], 60, f'm{i}-{k}', temperature=0.))
            moves += 1
            same = next((j for j, (x, y) in enumerate(zip(ids, a.ids)) if x != y), len(ids))
            gap = max(gap, float(np.abs(logprobs[:same - k] - a.logprobs[k:same]).max(initial=0.)))
            if ids != a.ids: ties += 1
    figures.update(moves=moves, near_ties=ties, logprob_gap_max=gap)
    assert moves >= 20 and ties <= moves // 10 and gap < 1e-4


def test_a_sampled_answer_that_moved_does_not_repeat_its_noise(world):
    "With one seed for both parts the second would draw what the first has drawn"
    hold(world, world.a)
    had = run(world, ask(world, LONG[:5], 20, id=950, seed=11)).ids
    rest = [run(world, resumed(world, LONG[:5], had[:n], 20 + n, f's{n}', seed=11))[0][n:] for n in (1, 2, 3)]
    assert len({tuple(r[:8]) for r in rest}) == 3


def test_weights_change_between_two_tokens(world):
    "`keep`: the request goes on, and what follows is of the new weights (with old keys and values: neither model's own answer)"
    hold(world, world.a)
    async def go():
        request = GenerationRequest('live', np.array(LONG[:9], np.int32), 200, temperature=1., seed=4)
        chunks, switched = [], None
        async for c in world.engine.generate(request):
            chunks.append(c)
            if switched is None and sum(len(c.ids) for c in chunks) >= 16: switched = await world.engine.load(version, world.socket, keep=True)
        return np.concatenate([c.ids for c in chunks]), chunks[-1].finish_reason, switched
    plain = run(world, ask(world, LONG[:9], 200, id='plain', temperature=1., seed=4)).ids
    version = publish(world, dict(world.b.named_parameters()))
    ids, finish, report = run(world, go())
    world.holds = None
    assert report.version == version and report.checksum_ok and finish in ('stop', 'length')
    assert ids[:8].tolist() == plain[:8] and ids.tolist() != plain


def always(model, token):
    "Weights under which every token that is sampled is this one"
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    for n, p in named.items():
        if n.endswith(('o_proj.weight', 'down_proj.weight')): p.zero_() # what comes out of each layer is what went in: the embedding
    named['model.embed_tokens.weight'][:, 0] = 1.
    named['model.embed_tokens.weight'][token, 0] = 2.
    named['model.norm.weight'].zero_()[0] = 200.
    return named

def test_every_token_is_of_the_version_that_it_is_labelled_with(world):
    """`inflight`: 40 answers run, weights change under them six times. Under version v every token is TOKEN[v], so each token says itself which weights made it;
    and vLLM holds back up to 8 of them"""
    pieces, events, token = [], [], {}
    async def keep(report):
        events.extend(report.events)
        pieces.extend((report.version, p) for p in report.pieces)
    def next_version():
        v = publish(world, always(world.a, 5 + world.version % 3))
        token[v] = 5 + (v - 1) % 3
        return v
    async def until(condition):
        while not condition(): await asyncio.sleep(.005)
    async def go():
        worker = RolloutWorker(0, world.engine, keep, interval_s=.01, seed=1)
        worker.begin()
        await worker.wave(1, next_version(), world.socket, [Assignment(i, 1, np.array([5, i % 9 + 2], np.int32), Sampling(max_tokens=120 + i)) for i in range(40)])
        for n in range(1, 7):
            await until(lambda: sum(len(p.ids) // 4 for _, p in pieces) > n * 600)
            await worker.switch(1, next_version(), world.socket)
        await until(lambda: sum(p.finish is not None for _, p in pieces) == 40)
        await worker.leave()
    run(world, go())
    world.holds = None
    assert [type(e).__name__ for e in events] == ['WaveStarted', *['Switched'] * 6]
    for i in range(40):
        mine = [(v, p) for v, p in pieces if p.trajectory == i]
        assert [p.first for _, p in mine] == [0, *(p.last for _, p in mine[:-1])] and mine[-1][1].last == 120 + i and mine[-1][1].finish == 'length'
        for v, p in mine: assert set(np.frombuffer(p.ids, np.int32).tolist()) <= {token[v]}, (i, v, p.first)
    assert len({len({v for v, p in pieces if p.trajectory == i}) for i in range(40)} - {1}) >= 1 and len({v for v, _ in pieces}) >= 5


@pytest.mark.parametrize('end, handed', [('FINISHED_LENGTH_CAPPED', True), ('FINISHED_ABORTED', False)])
def test_vllm_hands_over_no_keys_and_values_of_what_is_aborted(end, handed):
    "Why a move reads its tokens again. If this fails, moves may take their KV cache along"
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler as nixl
    from vllm.v1.request import RequestStatus
    scheduler = next(c for n, c in vars(nixl).items() if n.endswith('Scheduler') and c.__module__ == nixl.__name__)
    it = SimpleNamespace(_stop_heartbeat=lambda id: None, is_bidirectional_kv_xfer_enabled=True, _reqs_not_processed=set(), _reqs_need_save={}, _reqs_need_send={}, _kv_lease_duration=1, _TRANSFER_MODE='pull',
                         get_exchange_clipped_blocks=lambda blocks: blocks, engine_id='e', side_channel_host='h', side_channel_port=1, transfer_tp_size=1,
                         vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)))
    request = SimpleNamespace(request_id='r', status=RequestStatus[end], kv_transfer_params=dict(do_remote_decode=True), num_computed_tokens=64)
    kept, params = scheduler.request_finished(it, request, ([1, 2],))
    assert kept == handed == (params is not None)


def test_memory_is_given_away_and_taken_back(world):
    hold(world, world.a)
    before = run(world, ask(world, LONG, 10, id='before', temperature=0.)).ids
    run(world, world.engine.suspend())
    assert world.engine.stats().kv_used == 0.
    run(world, world.engine.resume())
    assert run(world, ask(world, LONG, 10, id='after', temperature=0.)).ids == before


def test_turns(world):
    "Conversations with a tool: moved five times or not, the tokens are the same, and their log-probs those of transformers"
    import torch
    from laminar_sdk.rollout.environment_pool import EnvironmentPool, pack_environment
    from test_rollout_turns import Steps, on_a_real_engine
    hold(world, world.a)
    def logprobs(ids):
        with torch.no_grad(): rows = world.a(torch.tensor(ids.astype('int64'))[None]).logits[0].log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(ids.astype('int64'))[1:, None])[:, 0].numpy()
    async def story():
        pool = EnvironmentPool(pack_environment(Steps()))
        try: return await on_a_real_engine(world.engine, pool, logprobs=logprobs)
        finally: await pool.stop()
    assert sum(len(t.calls) > 1 for t in run(world, story())) > 0


def test_killed(world, figures):
    "kill -9 of the core: everything in flight ends with EngineDead at once, a load in its middle too, and what comes later. Stands last"
    async def go():
        eos, world.engine.eos_ids = world.engine.eos_ids, ()
        answers = [asyncio.create_task(ask(world, [5], 200, id=i)) for i in range(8)]
        while world.engine.stats().running < 8: await asyncio.sleep(.005)
        os.kill(world.engine.pids()[0], signal.SIGSTOP) # it will die before it has answered
        load = asyncio.create_task(world.engine.load(None, world.socket))
        await asyncio.sleep(.2)
        began = time.perf_counter()
        os.kill(world.engine.pids()[0], signal.SIGKILL)
        ended = await asyncio.gather(load, *answers, return_exceptions=True)
        took = time.perf_counter() - began
        assert all(isinstance(e, EngineDead) for e in ended), ended
        for later in (ask(world, [5]), world.engine.load(None, world.socket), world.engine.abort(1)):
            with pytest.raises(EngineDead): await later
        return took
    figures['seconds_to_notice'] = took = run(world, go())
    assert took < 10


def test_a_load_that_takes_too_long_ends_its_engine():
    "A relay that accepts and then says nothing would hold its rollout for ever"
    from laminar_sdk.rollout.vllm_engine import VLLMEngine
    killed = []
    async def go():
        engine = VLLMEngine('m', load_timeout_s=.05)
        engine.cores, engine.died = [SimpleNamespace(pid=7, is_alive=lambda: True, kill=lambda: killed.append(7))], asyncio.get_running_loop().create_future()
        with pytest.raises(EngineDead, match='0 s were not enough'): await engine._while_alive(asyncio.sleep(99), 'version 3 was being loaded')
        assert await engine._while_alive(asyncio.sleep(0, 'done'), 'nothing') == 'done'
    asyncio.run(go())
    assert killed == [7]


def test_no_model():
    from laminar_sdk.rollout.vllm_engine import VLLMEngine
    with pytest.raises(MissingError, match='no model folder'): asyncio.run(VLLMEngine('./nowhere').start())


@pytest.mark.long
@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_the_core_dies_with_its_parent(method, tmp_path, figures):
    tiny(tmp_path/'A', 0)
    code = f"""
import asyncio
from laminar_sdk.rollout.vllm_engine import VLLMEngine
async def main():
    e = VLLMEngine({str(tmp_path/'A')!r}, max_model_len=64, kv_cache_bytes=16 << 20, start_method={method!r})
    await e.start()
    print('PIDS', *e.pids(), *e.seconds.values(), flush=True)
    await asyncio.sleep(600)
if __name__ == '__main__': asyncio.run(main())
"""
    (tmp_path/'p.py').write_text(code)
    p = subprocess.Popen([sys.executable, tmp_path/'p.py'], stdout=subprocess.PIPE, text=True)
    try:
        words = next(line for line in p.stdout if line.startswith('PIDS')).split()
        core = Path(f'/proc/{words[1]}/stat')
        figures |= dict(imports=float(words[2]), engine=float(words[3]))
        assert core.exists()
    finally: p.kill(); p.wait()
    deadline = time.monotonic() + 30
    while core.exists() and core.read_text().split(') ')[1][0] != 'Z': assert time.monotonic() < deadline; time.sleep(.02)
