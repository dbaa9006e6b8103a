"Tasks of `verifiers.v1`, with tools and without, as environments. Skipped where it is not installed"
import asyncio, json
import pytest

pytest.importorskip('verifiers', reason='verifiers is not installed: pip install laminar_sdk[verifiers]')
import verifiers.v1 as vf

from laminar_sdk.core.errors import ConfigError
from laminar_sdk.rollout.verifiers_env import VerifiersEnvironment


class SumData(vf.TaskData):
    answer: int = 0

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None
    async def setup_task(self, task): self.offset = task.idx
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        "The sum of two numbers"
        if a > 99: raise OverflowError('too large')
        return a + b

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.)
    async def right(self, task, trace): return float(str(task.answer) in trace.last_reply)
    @vf.reward
    async def used_the_tool(self, trace): return .5 * bool(trace.tool_messages)
    @vf.metric
    async def turns(self, trace): return trace.num_turns
    @vf.stop
    async def enough(self, trace: vf.Trace): return trace.num_turns >= 3

class WithTool(SumTask):
    @classmethod
    def toolsets(cls, config): return [Calculator(vf.ToolsetConfig())]

class Boxed(SumTask):
    NEEDS_CONTAINER = True

class Runs(SumTask):
    @vf.reward
    async def tests_pass(self, runtime): return 1.

def taskset(kind, endless=False):
    class Sums(vf.Taskset[kind, vf.TasksetConfig]):
        INFINITE = endless
        def load(self):
            for i in range(10 ** 9 if endless else 3): yield kind(SumData(prompt=f'What is {i} + 10?', system_prompt='Be brief.' if i else None, answer=i + 10), self.config.task)
    return Sums(vf.TasksetConfig(id='sums'))

def play(env, row, *turns):
    async def story():
        await env.reset(row, 0)
        return [await env.step(t, []) for t in turns]
    return asyncio.run(story())

def call(**arguments): return '<tool_call>' + json.dumps(dict(name='add', arguments=arguments)) + '</tool_call>'


def test_one_turn():
    env = VerifiersEnvironment(taskset(SumTask))
    rows = env.rows()
    assert len(rows) == 3 and env.stops == () and [m['role'] for m in rows[1]['prompt']] == ['system', 'user'] and len(env.rows(2)) == 2
    for answer, reward in (('It is 11.', 2.), ('It is 12.', 0.), ('', 0.)):
        last, = play(env, rows[1], answer)
        assert (last.reward, last.done, last.text) == (reward, True, '')


def test_with_a_tool():
    env = VerifiersEnvironment(taskset(WithTool), max_chars=150)
    row = env.rows()[2]
    assert env.stops == ('</tool_call>',) and 'add(a: int, b: int) -> int: The sum of two numbers' in row['prompt'][0]['content'] and 'Be brief.' in row['prompt'][0]['content']
    told, last = play(env, row, 'Let me see. ' + call(a=2, b=10), 'So 12.')
    assert (told.text, told.done, told.reward) == ('12', False, None) and (last.reward, last.done) == (2.5, True)
    assert [n.message.role for n in env.trace.nodes] == ['system', 'user', 'assistant', 'tool', 'assistant'] and env.trace.metrics == dict(turns=2)
    wrong = [play(env, row, t)[0].text for t in (call(a=100, b=1), call(c=1), '<tool_call>{</tool_call>', call(a=1, b=2).replace('add', 'rm'))]
    assert 'OverflowError' in wrong[0] and 'TypeError' in wrong[1] and 'cannot be read' in wrong[2] and "no function 'rm'" in wrong[3] and all(len(w) < 190 for w in wrong)
    assert [s.done for s in play(env, row, *[call(a=1, b=1)] * 3)] == [False, False, True] # its own @stop


def test_what_cannot_be_played_is_refused():
    for kind, what in ((Boxed, 'container'), (Runs, 'tests_pass')):
        with pytest.raises(ConfigError, match=what): VerifiersEnvironment(taskset(kind)).rows()
    with pytest.raises(ConfigError, match='for ever'): VerifiersEnvironment(taskset(SumTask, endless=True)).rows()
    assert len(VerifiersEnvironment(taskset(SumTask, endless=True)).rows(5)) == 5
    with pytest.raises(ConfigError, match="no column 'task'"): play(VerifiersEnvironment(taskset(SumTask)), dict(prompt='x'))


def test_in_processes_of_its_own():
    from laminar_sdk.rollout.environment_pool import EnvironmentPool, pack_environment
    env = VerifiersEnvironment(taskset(WithTool), deterministic=True)
    rows = env.rows()
    async def story():
        pool = EnvironmentPool(pack_environment(env), workers=1)
        try:
            for i in (0, 1, 2): await pool.open(i, rows[i], 0)
            told = await asyncio.gather(*(pool.step(i, 1, call(a=i, b=10), []) for i in (0, 1, 2)))
            await pool.processes[0].kill()
            last = await asyncio.gather(*(pool.step(i, 2, f'{i + 10}', []) for i in (0, 1, 2)))
            return [r.text for r in told], [(r.reward, r.done, r.failed) for r in last], pool.replayed
        finally: await pool.stop()
    assert asyncio.run(story()) == (['10', '11', '12'], [(2.5, True, '')] * 3, 3)
