"Reward functions: whatever they do is a value or a counted reason, in bounded time, and only their own group's affair"
import asyncio, json, math, os, pickle, signal, subprocess, sys, textwrap, time
from fractions import Fraction
from pathlib import Path
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from laminar_sdk.core.config import Reward
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.rollout.reward_process import LOG, Worker
from laminar_sdk.rollout.reward_workers import RewardPool, pack, pack_rewards
from laminar_sdk.rollout.rewards import arguments, combine, exact_match, math_verify, validate

def texts(n=3): return [dict(prompt=f'{i}+1=', answer=str(i + 1)) for i in range(n)]

GROUP = arguments(texts(), ['1', '2', '9'], [[1], [2], [9, 9]], dict(step=5))


def in_a_loop(story, workers=2):
    "Run a coroutine function with a pool; no worker is left behind"
    async def main():
        async with RewardPool(workers=workers) as pool:
            await story(pool)
            children = list(pool._all)
        assert not any(runs(w.pid) for w in children)
    asyncio.run(main())

def runs(pid):
    try: return Path(f'/proc/{pid}/stat').read_text().rsplit(')')[1].split()[0] != 'Z'
    except FileNotFoundError: return False

def one(fn, timeout_s=20., **more): return pack(Reward(fn=fn, timeout_s=timeout_s, **more))


def hang(completions): time.sleep(1e9)
def spin(completions):
    while True: ...
def swallow(completions):
    while True:
        try: time.sleep(1e9)
        except BaseException: ...
def unkind(completions):
    for s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
    time.sleep(1e9)
def shout(completions):
    while True: os.write(1, b'x' * 65536)
async def sleep(completions): await asyncio.sleep(1e9)

def bug(completions): return [1 / 0]
def leave(completions): sys.exit(0)
def interrupt(completions): raise KeyboardInterrupt
def recurse(completions): return recurse(completions)
class Odd(Exception):
    def __str__(self): raise ValueError('no text')
def odd(completions): raise Odd
def wants(solution): return [1.]

def vanish(completions): os._exit(0)
def killed(completions): os.kill(os.getpid(), signal.SIGKILL)
def segfault(completions): __import__('ctypes').string_at(0)
def cut_off(completions): os.closerange(3, 2000)
def babble(completions):
    for fd in range(3, 2000): # wherever the socket is: a parent with many open files hands down a high number
        try: os.write(fd, b'\xff\xff\xff\x7f' + b'x' * 5000)
        except OSError: ...
    time.sleep(1e9)
def forked(completions):
    if os.fork(): os._exit(1)
    time.sleep(1e9)

def nan(completions): return [1., math.nan, -math.inf]
def few(completions): return [1.]
def matrix(completions): return np.ones((3, 2))
def words(completions): return ['a'] * 3
def nothing(completions): ...
def huge(completions): return [0.] * 1_000_000

@pytest.mark.parametrize('fns, reason', [
    ((hang, spin, swallow, unkind, shout, sleep), 'reward_timeout'), ((bug, leave, interrupt, recurse, odd, wants), 'reward_error'),
    ((vanish, killed, segfault, cut_off, babble, forked), 'reward_died'), ((few, matrix, huge), 'reward_shape'), ((nothing, words), 'reward_type')])
def test_each_wrong_has_its_reason(fns, reason):
    async def story(pool):
        limit = .3 if reason == 'reward_timeout' else 20.
        for fn in fns:
            r = await pool.score_one(one(fn, limit), GROUP)
            assert r.failed == dict.fromkeys(range(3), reason) and r.values == [None] * 3 and (r.error or fn is nothing), (fn, r)
            assert len(r.error) < 5000 and len(r.log) <= LOG
        assert pool.reasons == {reason: 3 * len(fns)}
        assert (await pool.score_one(one(exact_match), GROUP)).values == [1., 1., 0.] # and the next call finds all in order
    in_a_loop(story)


def test_a_fault_of_one_value_is_that_trajectorys():
    async def story(pool):
        r = await pool.score_one(one(nan), GROUP)
        assert r.values == [1., None, None] and r.failed == {1: 'reward_nan', 2: 'reward_nan'}
    in_a_loop(story)


def test_a_stuck_group_delays_no_other():
    async def story(pool):
        stuck = asyncio.ensure_future(pool.score_one(one(hang, 30.), GROUP))
        await asyncio.wait_for(asyncio.gather(*(pool.score_one(one(exact_match), GROUP) for _ in range(30))), 20)
        assert not stuck.done()
        stuck.cancel() # a cancelled call frees its worker
        await asyncio.gather(stuck, return_exceptions=True)
        assert [(await pool.score_one(one(exact_match), GROUP)).values for _ in range(3)] == [[1., 1., 0.]] * 3
        assert pool._idle.qsize() == 2
    in_a_loop(story)


def test_waiting_for_a_worker_does_not_count():
    def slow(completions):
        import time
        time.sleep(.15)
        return [1.] * 3
    async def story(pool):
        began = time.monotonic()
        results = await asyncio.gather(*(pool.score_one(one(slow, 2.), GROUP) for _ in range(15)))
        assert time.monotonic() - began > 2.2 and not any(r.failed for r in results)
    in_a_loop(story, workers=1)


def test_many_failures_leak_nothing():
    "pitfalls 6 and 20: no worker slot, descriptor, task or process is lost"
    async def story(pool):
        await pool.score_one(one(vanish), GROUP)
        before, tasks = len(os.listdir('/proc/self/fd')), len(asyncio.all_tasks())
        for i in range(8): await asyncio.gather(*(pool.score_one(one(fn, .05), GROUP) for fn in (vanish, hang, bug)))
        assert len(os.listdir('/proc/self/fd')) <= before + 2 and len(asyncio.all_tasks()) == tasks
        assert pool._idle.qsize() == 2 and sum(w.alive for w in pool._all) == 2
    in_a_loop(story)


def test_called_as_trl_calls():
    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        assert set(kwargs) == {'level'} and kwargs['level'] == [None, 2]
        assert completions == ['1', [dict(role='assistant', content='2')]] and completion_ids == [[1], [2]]
        assert prompts == ['0+1=', [dict(role='user', content='1+1=')]] and answer == ['1', '2'] and trainer_state.step == 5
        log_metric('n', len(prompts))
        log_extra('text', prompts)
        print('one', end='')
        os.system('echo two')
        return [None, 1]
    rows = [dict(prompt='0+1=', answer='1'), dict(prompt=[dict(role='user', content='1+1=')], answer='2', level=2)]
    async def story(pool):
        r = await pool.score_one(one(reward), arguments(rows, ['1', '2'], np.array([[1], [2]]), dict(step=5)))
        assert r.values == [None, 1.] and not r.failed and r.metrics == dict(n=[2.]) and len(r.extra['text']) == 2 and r.log == 'onetwo\n', r
    in_a_loop(story)


def test_several_functions_one_sum_and_no_text_in_its_error():
    class Brief:
        async def __call__(self, completion_ids): return [None if len(i) > 1 else .5 for i in completion_ids]
    def picky(completions): raise ValueError(f'secret {completions[0]}')
    async def story(_):
        heard = []
        pool = RewardPool(pack_rewards([Reward(fn=exact_match), Reward(fn=Brief(), weight=2.)]), log=heard.append)
        s = await pool.score(GROUP)
        assert s.reward == [2., 2., 0.] and s.by_name == dict(exact_match=[1., 1., 0.], Brief=[.5, .5, None]) and not s.reasons and s.error == ''
        await pool.close()
        pool = RewardPool([one(exact_match), one(picky)], log=heard.append)
        s = await pool.score(GROUP)
        assert s.reward == [None] * 3 and s.reasons == dict.fromkeys(range(3), 'reward_error') and s.error == 'picky: reward_error (ValueError)'
        assert any('secret 1' in line and line.startswith('picky: ') for line in heard) and heard == pool.logs()
        await pool.close()
        assert (await pool.score(GROUP)).reasons == dict.fromkeys(range(3), 'reward_died') and not any(w.alive for w in pool._all)
    in_a_loop(story)


def test_one_trajectory_a_call():
    def each(completions, answer):
        assert len(completions) == len(answer) == 1
        if answer == ['2']: raise ValueError
        return [float(answer[0])]
    async def story(pool):
        r = await pool.score_one(one(each, scope='trajectory'), GROUP)
        assert r.values == [1., None, 3.] and r.failed == {1: 'reward_error'} and 'ValueError' in r.error
    in_a_loop(story)


def test_modules_beside_the_notebook(tmp_path, monkeypatch):
    (tmp_path/'besides').mkdir()
    (tmp_path/'besides/__init__.py').write_text('FACTOR = 2\n')
    (tmp_path/'besides/deep.py').write_text('import re\nfrom besides import FACTOR\nclass Scale:\n    def __call__(self, x): return x * FACTOR\n')
    (tmp_path/'own.py').write_text(textwrap.dedent('''
        import besides.deep
        def reward(completions): return [besides.deep.Scale()(len(completions))] * 3
        def inside(completions):
            from besides.deep import Scale
            return [Scale()(1)] * 3'''))
    monkeypatch.syspath_prepend(tmp_path)
    import besides.deep, own
    import cloudpickle
    cloudpickle.register_pickle_by_value(besides) # the user's own doing, which must stay
    packed = [one(own.inside), pack(Reward(fn=own.reward), ship=['besides', 'besides.deep']), pack(Reward(fn=own.inside), ship=[besides, besides.deep])]
    assert cloudpickle.list_registry_pickle_by_value() == {'besides'}
    cloudpickle.unregister_pickle_by_value(besides)
    sys.path.remove(str(tmp_path)) # the workers are on another machine
    async def story(pool):
        missing, by_name, inside = [await pool.score_one(p, GROUP) for p in packed]
        assert 'ship=[module]' in missing.error and missing.failed
        assert (by_name.values, inside.values) == ([6.] * 3, [2.] * 3), (by_name.error, inside.error)
    in_a_loop(story)
    lock = __import__('threading').Lock()
    with pytest.raises(ConfigError, match='inside the function'): one(lambda completions: lock)
    with pytest.raises(ModuleNotFoundError): pack(Reward(fn=own.inside), ship=['no_such_module'])


def test_an_import_may_take_longer_than_a_call():
    class Slow:
        def __call__(self, completions): return []
        def __reduce__(self): return eval, ("__import__('time').sleep(1.5) or (lambda completions: [1.] * len(completions))",)
    async def story(pool):
        r = await pool.score_one(one(Slow(), timeout_s=1., name='slow'), GROUP)
        assert r.values == [1.] * 3
        pool.load_timeout_s = .1
        r = await pool.score_one(one(Slow(), name='slower', weight=2.), GROUP) # the other worker has not loaded it
        assert set(r.failed.values()) == {'reward_timeout'} and 'load' in r.error
    in_a_loop(story)


def test_workers_are_light_and_private():
    def me(completions):
        import os, sys
        rss = int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])
        print(rss, len([m for m in ('torch', 'numpy', 'pydantic', 'ray', 'pyarrow', 'asyncio') if m in sys.modules]), os.getpgid(0) == os.getpid())
        return [1.] * 3
    async def story(pool):
        rss, heavy, leads = (await pool.score_one(one(me), GROUP)).log.split()
        assert int(rss) < 40_000 and heavy == '0' and leads == 'True'
    in_a_loop(story)


PARENT = '''
import asyncio
from laminar_sdk.core.config import Reward
from laminar_sdk.rollout.reward_workers import RewardPool, pack
def spin(completions):
    while True: pass
async def main():
    pool = RewardPool(workers=2)
    pool.start()
    asyncio.ensure_future(pool.score_one(pack(Reward(fn=spin)), dict(completions=['a'], trainer_state={})))
    await asyncio.sleep(.5)
    print(*[w.pid for w in pool._all], flush=True)
    await asyncio.sleep(1e6)
asyncio.run(main())
'''

def test_workers_die_with_their_parent():
    p = subprocess.Popen([sys.executable, '-c', PARENT], stdout=subprocess.PIPE, text=True)
    pids = [int(s) for s in p.stdout.readline().split()]
    assert len(pids) == 2 and all(map(runs, pids))
    p.kill()
    p.wait()
    until = time.monotonic() + 30
    while any(map(runs, pids)) and time.monotonic() < until: time.sleep(.01)
    assert not any(map(runs, pids))


def test_the_parent_unpickles_nothing():
    "What comes back is read as JSON: a child that sends a pickle has died, and the pickle is not run"
    class Boom:
        def __reduce__(self): return os.mkdir, (str(Path('/tmp')/f'boom-{os.getpid()}'),)
    body = pickle.dumps(Boom())
    def evil(completions):
        import os
        for fd in range(3, 2000): # wherever the socket is: a parent with many open files hands down a high number
            try: os.write(fd, len(body).to_bytes(4, 'little') + body)
            except OSError: ...
        os._exit(0)
    async def story(pool):
        assert set((await pool.score_one(one(evil), GROUP)).failed.values()) == {'reward_died'}
    in_a_loop(story)
    assert not Path(f'/tmp/boom-{os.getpid()}').exists()


numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-2**60, 2**60), st.booleans(), st.none(), st.fractions(),
                    st.floats(-9, 9).map(np.float64), st.integers(-9, 9).map(np.int32))
junk = st.one_of(st.just(math.nan), st.just(math.inf), st.just(10**400), st.text(), st.binary(), st.lists(st.floats()), st.just(1j), st.just({}), st.just(np.ones(2)))

@settings(max_examples=60)
@given(st.lists(numbers | junk, max_size=6), st.integers(0, 6), st.sampled_from([list, tuple, iter]))
def test_validate_gives_floats_or_reasons(values, n, kind):
    got, failed = validate(kind(values) if kind is not iter else (v for v in values), n)
    assert len(got) == n and all(v is None or (type(v) is float and math.isfinite(v)) for v in got)
    if len(values) != n: assert failed == dict.fromkeys(range(n), 'reward_shape')
    else: assert all(got[i] is None for i in failed) and all((i in failed) or (v is None) == (got[i] is None) for i, v in enumerate(values))
    assert set(failed.values()) <= {'reward_shape', 'reward_type', 'reward_nan'}
    json.dumps(got)


def test_tensors():
    import torch
    for good in (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), [torch.tensor(1.), np.float16(1)], [torch.tensor([1.]), True], [Fraction(1), 1]):
        assert validate(good, 2) == ([1., 1.], {}), good
    for bad in (torch.ones(2, 2), torch.ones(1, 2), torch.ones(()), torch.ones(3), [torch.ones(2), 1.]):
        assert 'reward_shape' in validate(bad, 2)[1].values() or bad.dim() == 0 and set(validate(bad, 2)[1].values()) == {'reward_type'}, bad


@given(st.lists(st.tuples(st.none() | st.floats(-5, 5), st.none() | st.floats(-5, 5), st.booleans()), min_size=1, max_size=5), st.floats(-2, 2))
def test_sums(rows, w):
    failed = {i: 'reward_nan' for i, (_, b, bad) in enumerate(rows) if bad}
    total, parts, reasons = combine(dict(a=1., b=w), dict(a=[r[0] for r in rows], b=[r[1] for r in rows]), dict(b=failed))
    for i, (a, b, bad) in enumerate(rows):
        if bad: assert total[i] is None and reasons[i] == 'reward_nan'
        elif a is None and b is None: assert total[i] is None and reasons[i] == 'reward_none'
        else: assert total[i] == pytest.approx((a or 0.) + w * (b or 0.)) and i not in reasons
        assert parts[i] == dict(a=a, b=b)


def test_mathematics_in_a_worker():
    async def story(pool):
        r = await pool.score_one(one(math_verify, timeout_s=60.), arguments([dict(prompt='?', answer=r'\frac{1}{2}')] * 3, ['$0.5$', r'\boxed{2/4}', 'no'], [[1]] * 3))
        assert r.values == [1., 1., 0.], r.error
    in_a_loop(story)
