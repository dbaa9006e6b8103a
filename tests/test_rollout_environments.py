"Environments in processes: each call once, each fault its own trajectory's, every process ended"
import asyncio, os, random, signal, subprocess, sys, threading, time
from pathlib import Path
import pytest
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.rollout.environment import Environment, Observation, Step
from laminar_sdk.rollout.environment_pool import EnvironmentPool, pack_environment
from laminar_sdk.rollout.sandbox import Limits, PythonSandbox
from laminar_sdk.rollout.tool_env import GymEnvironment, ToolEnvironment, calculate
from test_rollout_sandbox import needs_namespaces


class Counts(Environment):
    "Says how often it was called in this process, and what it was told"
    deterministic = True
    def __init__(self): self.turns = []
    def reset(self, task, seed): return Observation(f'{task.get("name", "")}{seed}')
    def step(self, text, ids):
        self.turns.append(text)
        if text == 'die': os._exit(7)
        if text == 'hang': time.sleep(1e9)
        if text == 'print': print('hello from within')
        return Step('/'.join(self.turns), reward=len(ids))

def with_pool(env, story, **options):
    async def main():
        pool = EnvironmentPool(pack_environment(env), **options)
        try: return await asyncio.wait_for(story(pool), 100)
        finally:
            everyone = list(pool.processes)
            await pool.stop()
            assert not any(p.alive for p in everyone)
    return asyncio.run(main())

def kill(pool, which=0): os.kill(pool.processes[which].pid, signal.SIGKILL)


def test_calls_are_answered_once_whoever_asks():
    async def story(pool):
        assert (await pool.open(1, dict(name='a'), 5)).text == 'a5'
        asked = [asyncio.ensure_future(pool.step(1, 1, 'x', [1, 2])) for _ in range(5)]
        asked[0].cancel() # its rollout died; the call goes on
        replies = await asyncio.gather(*asked[1:])
        assert {(r.text, r.reward) for r in replies} == {('x', 2.)} and pool.calls == 2
        assert (await pool.open(1, {}, 0)).text == 'a5' and (await pool.step(1, 2, 'y', [])).text == 'x/y'
        assert (await pool.step(1, 9, 'z', [])).failed == (await pool.step(2, 1, 'z', [])).failed == 'env_lost'
    with_pool(Counts(), story)


def test_a_turn_that_is_said_anew_is_answered_anew():
    async def story(pool):
        await pool.open(1, {}, 5)
        for n, word in enumerate('abc', 1): await pool.step(1, n, word, [])
        assert [(await pool.step(1, n, w, [])).text for n, w in ((2, 'B'), (3, 'c'), (3, 'c'), (3, 'C'))] == ['a/B', 'a/B/c', 'a/B/c', 'a/B/C']
        both = await asyncio.gather(pool.step(1, 4, 'd', []), pool.step(1, 4, 'D', [])) # the first of a rollout that does not know yet that it is dead
        assert [r.text for r in both] == ['a/B/C/d', 'a/B/C/D'] and pool.rewound == 3 and sum(p.sessions for p in pool.processes) == 1
    with_pool(Counts(), story)
    async def forgetful(pool):
        await pool.open(1, {}, 5)
        await pool.step(1, 1, 'a', [])
        assert (await pool.step(1, 1, 'A', [])).failed == 'env_lost'
    once = Counts()
    once.deterministic = False
    with_pool(once, forgetful)


def test_sessions_survive_the_death_of_every_process():
    async def story(pool):
        rng = random.Random(0)
        for id in range(6): await pool.open(id, {}, id)
        for turn in range(1, 6):
            for p in pool.processes: os.kill(p.pid, signal.SIGKILL) if rng.random() < .5 else None
            replies = await asyncio.gather(*(pool.step(id, turn, str(turn), []) for id in range(6)))
            assert {r.text for r in replies} == {'/'.join(map(str, range(1, turn + 1)))}
        assert pool.replayed > 5 and not pool.reasons
    with_pool(Counts(), story)


def test_who_kills_a_process_fails_and_neighbours_in_the_same_call_do_not():
    async def story(pool):
        for id in range(5): await pool.open(id, {}, 0)
        replies = await asyncio.gather(*(pool.step(id, 1, 'die' if id == 2 else 'ok', []) for id in range(5)))
        assert [r.failed for r in replies] == ['', '', 'env_lost', '', ''] and 'status 7' in replies[2].error
        replies = await asyncio.gather(*(pool.step(id, 2, 'ok', []) for id in (0, 1, 3, 4)))
        assert {r.text for r in replies} == {'ok/ok'}
        await pool.close(range(5))
        assert not pool.sessions and all(not p.alone or not p.alive for p in pool.processes) # who was alone takes its process along
    Counts.concurrency = 5
    with_pool(Counts(), story, workers=1)


def test_one_that_cannot_be_repeated_is_lost_with_its_process():
    class Once(Counts): deterministic = False
    async def story(pool):
        for id in (1, 2): await pool.open(id, {}, 0)
        kill(pool)
        await asyncio.sleep(.2)
        assert (await pool.step(1, 1, 'x', [])).failed == 'env_lost'
        assert (await pool.open(3, {}, 0)).text == '0' # what has not begun begins elsewhere
        assert pool.reasons == {'env_lost': 1}
    with_pool(Once(), story, workers=1)


def test_time_limits_and_what_was_printed():
    class Brief(Counts): timeout_s, reset_timeout_s = 1.5, 20.
    async def story(pool):
        for id in (1, 2): await pool.open(id, {}, 0)
        assert (await pool.step(2, 1, 'print', [])).text == 'print' and 'hello from within' in pool.lines
        hung = await pool.step(1, 1, 'hang', [])
        assert hung.failed == 'env_timeout' and '1.5 s' in hung.error and pool.reasons == {'env_timeout': 1}
        assert (await pool.step(2, 2, 'on', [])).text == 'print/on'
    with_pool(Brief(), story, workers=1)


def test_slow_calls_wait_side_by_side_up_to_the_limit():
    class Slow(Environment):
        concurrency, now, peak = 3, 0, 0
        async def step(self, text, ids):
            Slow.now += 1
            Slow.peak = max(Slow.peak, Slow.now)
            await asyncio.sleep(.1)
            Slow.now -= 1
            return str(Slow.peak)
    async def story(pool):
        for id in range(8): await pool.open(id, {}, 0)
        replies = await asyncio.gather(*(pool.step(id, 1, 'x', []) for id in range(8)))
        assert max(r.text for r in replies) == '3'
    with_pool(Slow(), story, workers=1)


def test_many_sessions_leave_nothing_behind():
    async def story(pool):
        before = len(os.listdir('/proc/self/fd'))
        for round in range(10):
            ids = range(round * 50, round * 50 + 50)
            await asyncio.gather(*(pool.open(id, {}, 0) for id in ids))
            await asyncio.gather(*(pool.step(id, 1, 'x', []) for id in ids))
            await pool.close(ids)
        assert not pool.sessions and sum(p.sessions for p in pool.processes) == 0 and not any(p.pending for p in pool.processes)
        assert len(os.listdir('/proc/self/fd')) <= before + 20
    with_pool(Counts(), story)


def test_an_environment_that_cannot_be_sent_and_one_that_cannot_be_loaded():
    class Holds(Counts):
        def __init__(self): self.lock = threading.Lock()
    with pytest.raises(ConfigError, match='cannot be sent'): pack_environment(Holds())
    class Missing(Counts):
        def __reduce__(self): return __import__, ('no_such_module_anywhere',)
    async def story(pool):
        reply = await pool.open(1, {}, 0)
        assert reply.failed == 'env_lost' and 'no_such_module_anywhere' in reply.error and 'ship' in reply.error
    with_pool(Missing(), story)


@pytest.mark.parametrize('proved', [True, False])
def test_starts_that_are_killed_say_nothing_against_an_environment_that_was_loaded_before(proved):
    async def story(pool):
        if proved:
            assert (await pool.open(1, {}, 0)).text == '0'
            kill(pool)
            await asyncio.sleep(.2)
        killed, born = [], pool._born
        def hunted(alone):
            process = born(alone)
            if len(killed) < 5:
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)
            return process
        pool._born = hunted
        reply = await pool.open(2, {}, 0)
        assert (reply.text, reply.failed, len(killed)) == (('0', '', 5) if proved else ('', 'env_lost', 3)) and ('SIGKILL' in reply.error) != proved
    with_pool(Counts(), story, workers=1)


def test_children_die_with_the_pool():
    code = '''
import asyncio
from laminar_sdk.rollout.environment import Environment
from laminar_sdk.rollout.environment_pool import *
class E(Environment):
    def step(self, text, ids): return text
async def main():
    pool = EnvironmentPool(pack_environment(E()))
    await pool.open(1, {}, 0); await pool.open(2, {}, 0)
    print(*(p.pid for p in pool.processes), flush=True)
    await asyncio.sleep(100)
asyncio.run(main())'''
    parent = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, parent.stdout.readline().split()))
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30
    while any(Path(f'/proc/{p}').exists() and 'Z' not in Path(f'/proc/{p}/stat').read_text().rsplit(')')[1][:3] for p in pids):
        assert time.monotonic() < until
        time.sleep(.05)
    assert len(pids) == 2


@needs_namespaces
def test_a_python_tool_in_its_process():
    env = ToolEnvironment({'python': PythonSandbox(Limits(seconds=4), site=False), 'calc': calculate}, max_chars=200)
    async def story(pool):
        for id in range(3): await pool.open(id, {}, 0)
        told = [(await pool.step(0, 1, '<python>print(sum(range(10)))</python>', [])).text, (await pool.step(0, 2, '<calc>3+8</calc>', [])).text,
                (await pool.step(1, 1, '<python>print("x" * 5000)</python>', [])).text, (await pool.step(2, 1, '<python>import time; time.sleep(99)</python>', [])).text]
        assert '45' in told[0] and '11' in told[1] and 'left out' in told[2] and 'stopped after 4 s' in told[3]
        kill(pool)
        assert '7' in (await pool.step(0, 3, '<calc>3+4</calc>', [])).text and not pool.reasons
    with_pool(env, story)


def test_gym_problems_count_whole_or_not_at_all():
    pytest.importorskip('reasoning_gym')
    from laminar_sdk.rollout.word_tasks import easy_tasks
    rows = easy_tasks(8)
    for row in rows:
        for answer, reward in ((row['answer'], 1.), (f'{row["answer"]}1', 0.), ('', 0.), ('\0', 0.), ('1, 2, 3, 4, 5', 0.)):
            env = GymEnvironment(tries=1)
            env.reset(row, 0)
            step = env.step(f'Answer: {answer}', [])
            assert (step.reward, step.done) == (reward, True), (row, answer)
    async def story(pool):
        assert (await pool.open(1, dict(prompt='no columns'), 0)).failed == 'env_error'
        await pool.open(2, rows[0], 0)
        again = await pool.step(2, 1, 'Answer: nonsense', [])
        right = await pool.step(2, 2, f'Answer: {rows[0]["answer"]}', [])
        assert (again.reward, again.done, right.reward, right.done) == (0., False, 1., True) and 'Try again' in again.text
    with_pool(GymEnvironment(tries=3), story)
