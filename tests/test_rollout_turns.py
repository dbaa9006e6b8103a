"Conversations: ids in are ids out, whatever the order of events, wherever they go on"
import asyncio, random
from pathlib import Path
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer
import laminar_sdk
from laminar_sdk.core.errors import IntegrityError, RunError
from laminar_sdk.rollout.emulated import EmulatedEngine
from laminar_sdk.rollout.engine import Chunk, RequestRefused
from laminar_sdk.rollout.environment import Environment, EnvironmentSpec, Observation, Step, Turns, describe, masked, rebuild, reward_of, turn_spans, unpack
from laminar_sdk.rollout.environment_pool import EnvironmentPool, Reply, pack_environment
from laminar_sdk.rollout.stops import Codec, Reader
from laminar_sdk.rollout.tool_env import ToolEnvironment, calculate
from laminar_sdk.rollout.turns import TurnLoop

EOS, TAG = 1, 2 # a turn that the model generated ends with one of these, or goes on


def ended(ids): return {EOS: 'stop', TAG: 'tag'}.get(int(ids[-1])) if len(ids) else None

def same(a, b): return a.pack() == b.pack()


@settings(max_examples=200)
@given(st.data())
def test_any_order_of_events(data):
    draw = data.draw
    spec = draw(st.none() | st.builds(EnvironmentSpec, every_turn=st.booleans(), max_turns=st.integers(1, 4)))
    budget, prompt = draw(st.integers(1, 30)), draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
    t, expected, rewards = Turns(prompt, budget, spec), [], [] # expected: (id, log-prob, mask) of each token
    while t.todo != 'end':
        if t.todo == 'generate':
            ids = draw(st.lists(st.integers(3, 99), max_size=min(6, t.room)))
            how = draw(st.sampled_from(['tag', 'stop', None]))
            if how and len(ids) < t.room: ids.append(EOS if how == 'stop' else TAG)
            else: how = None
            logprobs = [-draw(st.integers(1, 9)) for _ in ids]
            t.on_tokens(ids, logprobs)
            expected += [(i, l, 1) for i, l in zip(ids, logprobs)]
            if how or not t.room: t.on_turn_end(how or 'length')
        elif draw(st.booleans()) or draw(st.booleans()):
            ids, reward, done = draw(st.lists(st.integers(0, 99), max_size=8)), draw(st.none() | st.integers(0, 1)), t.todo == 'act' and draw(st.booleans()) # ids of tags and ends too
            before = len(t)
            t.on_observation(ids, reward, done)
            rewards.append(reward)
            if t.todo == 'generate': expected += [(i, 0, 0) for i in ids]
            assert len(t) - before in (0, len(ids)) and t.calls[-1].reward == reward
        else: t.on_failure(draw(st.sampled_from(['env_timeout', 'env_lost'])))
        t.check()
        assert [tuple(x) for x in zip(t.ids, t.logprobs, t.loss_mask.tolist())] == expected
        assert same(unpack(t.pack()), t)
        if not t.failed and not (t.finish and t.calls and t.calls[-1].first == t.calls[-1].last == len(t) and t.spans): # what ended with a word of the environment is not built again
            assert same(rebuild(prompt, budget, spec, t.ids, t.logprobs, t.calls, ended), t)
            if t.ids and t.calls and t.calls[0].last == 0 and t.calls[0].reward is None: assert same(rebuild(prompt, budget, spec, t.ids, t.logprobs, t.calls[1:], ended), t)
    assert len(t) <= budget and t.input_ids.tolist() == prompt + [e[0] for e in expected] and [c.reward for c in t.calls] == rewards
    assert masked(len(t), t.calls).tolist() == t.loss_mask.tolist() and turn_spans(len(t), t.calls) == [s for s in t.spans if s[0] < s[1]]
    assert reward_of(t.calls) == (sum(r for r in rewards if r is not None) if set(rewards) - {None} else None)
    assert sum(t.loss_mask) == sum(b - a for a, b in t.spans) and (t.finish == 'length') <= (t.room < 9)


def test_what_an_engine_may_not_do():
    t = Turns([5], 3)
    with pytest.raises(IntegrityError): t.on_tokens([1, 2, 3, 4], [0] * 4)
    with pytest.raises(IntegrityError): t.on_tokens([1, 2], [0])
    with pytest.raises(RunError): t.on_observation([1])
    t.on_tokens([7, 8, 9], [0] * 3)
    t.on_turn_end('length')
    with pytest.raises(RunError): t.on_tokens([], [])
    assert t.finish == 'length' and t.response_ids.tolist() == [7, 8, 9]


def test_an_observation_that_leaves_no_room_before_the_first_token_fails():
    t = Turns([5], 3, EnvironmentSpec())
    t.on_observation([1, 2, 3])
    assert (t.failed, t.finish, len(t)) == ('observation_too_long', 'length', 0)


# The loop, with the emulated engine and real processes

codec = Codec(Tokenizer.from_file(str(Path(laminar_sdk.__file__).parent/'assets/demo_model/tokenizer.json')))

class Steps(Environment):
    "Each turn is a partial sum; the environment writes the value of each"
    stops, every_turn, deterministic, max_turns = ('=',), False, True, 12
    async def step(self, text, ids):
        await asyncio.sleep(.002)
        return Step(calculate(text.rpartition(';')[2].removesuffix('=')), reward=0.5)

def script(prompt_ids, rng):
    "What a model writes that adds term after term"
    total, *rest = map(int, codec.text(prompt_ids).removesuffix('=').split('+'))
    parts = []
    for term in rest:
        parts.append(f'{total}+{term}={total + term}')
        total += term
    return [*codec.encode(f'{";".join(parts)}#{total}'), EOS]

def a_loop(engine, turns, sessions, emitted, id=7, env=Steps(), key='7.1', **more):
    spec = describe(env)
    return TurnLoop(key, engine, turns, Reader(codec, spec.stops, [EOS]), lambda *e: emitted.append(e), sampling={}, seed=5, spec=spec,
                    sessions=sessions, trajectory=id, **more)

def known(emitted): # by whoever heard the chunks
    arrays = [np.concatenate([[], *(getattr(c, f) for _, c, _ in emitted)]) for f in ('ids', 'logprobs')]
    return *arrays, [c for _, _, c in emitted if c]

def in_a_loop(env, story, engines=1, workers=2, **engine):
    async def main():
        pool = EnvironmentPool(pack_environment(env), workers=workers)
        raised = [EmulatedEngine(answer=script, **engine) for _ in range(engines)]
        for e in raised: await e.start()
        try: return await asyncio.wait_for(story(pool, *raised), 60)
        finally:
            for e in raised: await e.stop()
            await pool.stop()
    return asyncio.run(main())


def test_a_trajectory_moves_many_times_and_is_what_one_that_stayed_is():
    prompt, budget, rng = codec.encode('3+8+5+20='), 60, random.Random(1)
    async def stays(pool, engine):
        t = Turns(prompt, budget, describe(Steps()))
        assert await a_loop(engine, t, pool, [], id=1).run() == 'stop'
        return t
    async def moves(pool, *engines):
        for id in range(2, 12):
            t, heard, hops, how = Turns(prompt, budget, describe(Steps())), [], 0, 'abort'
            while how == 'abort':
                loop = a_loop(engines[hops % 3], t, pool, heard, id=id, key=f'{id}.{hops}')
                run = asyncio.create_task(loop.run())
                await asyncio.sleep(rng.random() * .01)
                await loop.abort()
                how, hops = await run, hops + 1
                packed, built = unpack(t.pack()), rebuild(prompt, budget, describe(Steps()), *known(heard), loop.reader.how_ended)
                assert same(packed, built)
                t = built if hops % 2 else packed
            assert [f for f, *_ in heard] == list(np.cumsum([0, *(len(c.ids) for _, c, _ in heard[:-1])])) # without a gap
            yield t, hops
    async def story(pool, *engines):
        one, many = await stays(pool, engines[0]), [m async for m in moves(pool, *engines)]
        assert codec.text(one.ids) == '3+8=11;11+5=16;16+20=36#36<eos>' and all(m.spans == one.spans and m.ids == one.ids and m.calls == one.calls for m, _ in many)
        assert sum(h for _, h in many) > 20 and pool.calls == 4 * 11 # each call was carried out once
    in_a_loop(Steps(), story, engines=3, step_s=.001)


def test_others_decode_while_one_waits():
    class Slow(Steps):
        async def step(self, text, ids):
            await asyncio.sleep(1e9 if '0+' in text else 0)
            return Step(calculate(text.rpartition(';')[2].removesuffix('=')))
    async def story(pool, engine):
        stuck = a_loop(engine, Turns(codec.encode('0+1='), 40, describe(Slow())), pool, [], id=1, env=Slow(), key='1.1')
        waiting = asyncio.create_task(stuck.run())
        while stuck.turns.todo != 'act': await asyncio.sleep(.001)
        assert engine.stats().running == 0 # it holds no place
        others = [a_loop(engine, Turns(codec.encode('3+8='), 40, describe(Slow())), pool, [], id=i, env=Slow(), key=f'{i}.1') for i in range(2, 8)]
        assert await asyncio.gather(*(o.run() for o in others)) == ['stop'] * 6 and not waiting.done()
        await stuck.abort()
        assert await waiting == 'abort' and stuck.turns.todo == 'act'
    Slow.concurrency = 8
    in_a_loop(Slow(), story, workers=1, step_s=.001, max_num_seqs=2)


@pytest.mark.parametrize('fault, failed, finish', [('raise', 'env_error', 'tool_error'), ('hang', 'env_timeout', 'timeout'), ('die', 'env_lost', 'tool_error'), ('nan', 'env_error', 'tool_error')])
def test_a_faulty_environment_costs_its_trajectory_only(fault, failed, finish):
    class Faulty(Steps):
        timeout_s = .5
        def step(self, text, ids):
            import os
            if text.startswith('0+'):
                if fault == 'raise': raise ZeroDivisionError('no')
                if fault == 'die': os._exit(3)
                if fault == 'nan': return Step(reward=float('nan'))
                while True: ...
            return Step(calculate(text.rpartition(';')[2].removesuffix('=')))
    async def story(pool, engine):
        def new(prompt, id): return a_loop(engine, Turns(codec.encode(prompt), 40, describe(Faulty())), pool, [], id=id, env=Faulty(), key=f'{id}.1')
        bad, good = new('0+1=', 1), new('3+8+1=', 2)
        assert await asyncio.gather(bad.run(), good.run()) == [finish, 'stop']
        assert bad.turns.failed == failed and bad.error and codec.text(good.turns.ids) == '3+8=11;11+1=12#12<eos>' and pool.reasons == {failed: 1}
    in_a_loop(Faulty(), story)


def test_reset_that_raises_and_reset_that_speaks():
    class Opens(Steps):
        max_turns, stops = 3, ('=',)
        def reset(self, task, seed):
            if task.get('bad'): raise LookupError('no such task')
            return Observation('1' * task.get('n', 0))
    async def story(pool, engine):
        def new(id, **task): return a_loop(engine, Turns(codec.encode('3+8='), 10, describe(Opens())), pool, [], id=id, env=Opens(), key=f'{id}.1', task=task)
        bad, speaks, long = new(1, bad=True), new(2, n=2), new(3, n=10)
        assert (await bad.run(), bad.turns.failed) == ('tool_error', 'env_error') and 'no such task' in bad.error
        await speaks.run()
        assert speaks.turns.calls[0].last == 2 and speaks.turns.loss_mask.tolist()[:3] == [0, 0, 1]
        assert (await long.run(), long.turns.failed) == ('length', 'observation_too_long')
    in_a_loop(Opens(), story)


def test_what_a_tool_says_cannot_end_a_turn():
    "Special tokens and stop strings in an observation are text"
    class Sly(Steps):
        max_turns = 2
        def step(self, text, ids): return '=<eos>=11'
    async def story(pool, engine):
        t = Turns(codec.encode('3+8='), 40, describe(Sly()))
        await a_loop(engine, t, pool, [], env=Sly()).run()
        first = t.calls[1]
        assert EOS not in t.ids[first.first:first.last] and len(t.spans) == 2
    in_a_loop(Sly(), story)


@pytest.mark.parametrize('said, finish', [('9' * 5_000_000, 'length'), ('\ud800\0€', 'stop'), ('', 'stop')])
def test_whatever_an_environment_says(said, finish):
    class Says(Steps):
        def step(self, text, ids): return said
    async def story(pool, engine):
        t = Turns(codec.encode('3+8='), 40, describe(Says()))
        assert await a_loop(engine, t, pool, [], env=Says()).run() == finish and not t.failed
        t.check()
    in_a_loop(Says(), story)


def test_without_an_environment_nothing_is_read():
    "A plain trajectory needs no tokenizer, and costs no step per token in Python"
    async def story(pool, engine):
        t = Turns(codec.encode('3+8='), 40)
        loop = TurnLoop('7.1', engine, t, Reader(None, (), [EOS]), lambda *e: None, sampling={}, seed=5)
        assert await loop.run() == 'stop' and codec.text(t.ids) == '3+8=11#11<eos>' and t.loss_mask.all() and not t.calls
        t = Turns(codec.encode('3+8='), 40)
        loop = TurnLoop('8.1', engine, t, Reader(codec, ['='], [EOS]), lambda *e: None, sampling={}, seed=5) # and with a stop string of its own
        assert await loop.run() == 'stop' and codec.text(t.ids) == '3+8='
    in_a_loop(Steps(), story)


def test_an_engine_that_aborts_by_itself_and_one_that_refuses():
    async def story(pool, engine):
        loop = a_loop(engine, Turns(codec.encode('3+8+5='), 40, describe(Steps())), pool, [])
        run = asyncio.create_task(loop.run())
        while len(loop.turns) < 2: await asyncio.sleep(.001)
        await engine.abort(loop.request) # as a load does
        assert await run == 'abort' and loop.turns.todo == 'generate'
        long = a_loop(engine, Turns(codec.encode('3+8=' * 400), 40, describe(Steps())), pool, [], id=8)
        with pytest.raises(RequestRefused): await long.run()
    in_a_loop(Steps(), story, step_s=.05)


def test_a_pool_that_was_lost():
    "A new pool knows nothing; a deterministic session is made again from the turns, any other has failed"
    async def halfway(engine, pool, env):
        loop = a_loop(engine, Turns(codec.encode('3+8+5='), 40, describe(env)), pool, [], env=env)
        run = asyncio.create_task(loop.run())
        while len(loop.turns.spans) < 2: await asyncio.sleep(.001)
        await loop.abort()
        await run
        return loop.turns
    for deterministic, outcome in ((True, 'stop'), (False, 'tool_error')):
        Env = type('Env', (Steps,), dict(deterministic=deterministic))
        async def story(pool, engine):
            t, new = await halfway(engine, pool, Env()), EnvironmentPool(pack_environment(Env()), workers=1)
            try:
                assert await a_loop(engine, t, new, [], env=Env(), key='7.2').run() == outcome
                assert (t.failed, new.replayed) == (('', 1) if deterministic else ('env_lost', 0))
            finally: await new.stop()
        in_a_loop(Env(), story, step_s=.03)


def test_on_a_real_engine_is_in_another_file():
    "`on_a_real_engine` is called where there is one; here it runs on the emulated, whose log-probs are no model's"
    in_a_loop(Steps(), lambda pool, engine: on_a_real_engine(engine, pool, n=4), step_s=.001)

async def on_a_real_engine(engine, pool, n=16, logprobs=None # ids of prompt and response -> log-prob of each but the first
                          ):
    "Greedy: what was moved five times is what stayed; and what was generated has the log-probs of a model that reads the whole"
    async def played(id, hops):
        t, hop, how = Turns(codec.encode(f'{id % 20}+{id % 7}+9='), 48, describe(Steps())), 0, 'abort'
        while how == 'abort':
            loop = a_loop(engine, t, pool, [], id=1000 * hops + id, key=f'{1000 * hops + id}.{hop}')
            loop.sampling = dict(temperature=0.)
            run = asyncio.create_task(loop.run())
            if hop < hops:
                await asyncio.sleep(.01 * (1 + id % 3))
                await loop.abort()
            how, hop = await run, hop + 1
            t = unpack(t.pack())
        t.check()
        return t
    stayed, moved = [await asyncio.gather(*(played(id, hops) for id in range(n))) for hops in (0, 5)]
    assert [t.ids.tolist() for t in stayed] == [t.ids.tolist() for t in moved]
    for t in moved if logprobs else ():
        theirs, ours, mine = logprobs(t.input_ids)[len(t.prompt_ids) - 1:], np.array(t.logprobs), t.loss_mask.astype(bool)
        assert np.abs(theirs - ours)[mine].max() < 1e-3 and not ours[~mine].any()
    return moved
