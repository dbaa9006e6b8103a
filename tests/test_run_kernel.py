"""A run and the kernel that started it: interrupted, restarted, shut down, run again. Jupyter's own ways of doing it, emulated engines.

`kill -9` of a kernel's pid proves little: Jupyter signals the whole process group.
"""
import json, queue, signal, subprocess, sys, time
from pathlib import Path

import pytest

from test_run import finish, model, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
ROOT = Path(__file__).parent.parent


class Kernel:
    "A Jupyter kernel and a client of it"

    def __init__(self, folder):
        from jupyter_client import KernelManager
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder))
        self.connect()

    def connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)

    def send(self, code: str) -> str:
        "After a cell that failed, Jupyter aborts what has arrived meanwhile unless it is told not to"
        return self.client.execute(code, stop_on_error=False)

    def busy(self, cell: str): # the cell has begun
        try: self._await(self.client.get_iopub_msg, cell, 60, lambda m: m['msg_type'] == 'execute_input')
        except queue.Empty: raise AssertionError(f'the cell has not begun; the kernel says {self.reply(cell, 5)}') from None

    def reply(self, cell: str, timeout: float = 60) -> dict: return self._await(self.client.get_shell_msg, cell, timeout)['content']

    def _await(self, get, cell, timeout, wanted=lambda m: True):
        deadline = time.monotonic() + timeout
        while True:
            m = get(timeout=max(deadline - time.monotonic(), .01))
            if m['parent_header'].get('msg_id') == cell and wanted(m): return m

    def run(self, code: str, timeout: float = 60):
        "Run a cell that must work"
        answer = self.reply(self.send(code), timeout)
        assert answer['status'] == 'ok', '\n'.join(answer.get('traceback', ['']))

    def value(self, expression: str):
        "What an expression is in the kernel"
        answer = self.reply(self.client.execute('', user_expressions={'x': f'__import__("json").dumps(({expression}))'}))
        x = answer['user_expressions']['x']
        assert x['status'] == 'ok', x
        return json.loads(eval(x['data']['text/plain']))

    def click(self, button: str): # a widget's model id
        "What the browser sends when a button is clicked"
        content = dict(comm_id=button, data=dict(method='custom', content=dict(event='click')))
        self.client.shell_channel.send(self.client.session.msg('comm_msg', content))

    def restart(self):
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self.connect()

    def end(self):
        self.client.stop_channels()
        if self.manager.has_kernel: self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path, laminar_home):
    k = Kernel(tmp_path)
    yield k
    k.end()


def cells(model, folder, name, steps):
    "A small notebook: cluster, objects, start"
    return [f'''
from laminar_sdk.all import *
cluster = Cluster.local(hosts=2)
''', f'''
relays = RelayTier(cluster, keep=4)
pool = RolloutPool(cluster, {model!r}, relays, replicas=2, max_model_len=64, max_running=8, engine='emulated', step_s=.005)
trainer = Trainer(cluster, {model!r}, relays, GRPO(group_size=2, lr=1e-3))
''', '''
def length(completions, **kw): return [len(c) / 100 for c in completions]
''', f'''
run = trainer.fit(pool, [dict(prompt=f'{{a}}+{{b}}=') for a in range(5) for b in range(5)], length, name={name!r}, steps={steps},
                  prompts_per_step=2, sampling=Sampling(max_tokens=40), checkpoint=2, run_dir={str(folder/name)!r})
''']


def goes_on(run):
    "Two more steps than now"
    assert running(run, run.status()['step'] + 2)['state'] == 'running'


def test_interrupt_restart_and_shutdown_of_the_kernel(cluster, model, tmp_path, kernel):
    from laminar_sdk.run import Run
    for cell in cells(model, tmp_path, 'kernel', 1_000_000): kernel.run(cell)
    run = Run.attach(cluster, 'kernel')
    running(run, 1)

    waiting = kernel.send('run.wait(show=False)')
    kernel.busy(waiting)
    time.sleep(.5)
    kernel.manager.interrupt_kernel()
    assert kernel.reply(waiting, 20)['ename'] == 'KeyboardInterrupt'
    goes_on(run)

    kernel.run('''
import ipywidgets, pathlib
button = ipywidgets.Button()
button.on_click(lambda _: pathlib.Path('clicked').touch())
''')
    button = kernel.value('button.model_id')
    waiting = kernel.send('await run')
    kernel.busy(waiting)
    time.sleep(.5)
    kernel.click(button)
    until((tmp_path/'clicked').exists) # the kernel answers a button while the cell waits
    kernel.manager.interrupt_kernel()
    assert kernel.reply(waiting, 20)['ename'] == 'CancelledError' # ipykernel's way
    goes_on(run)

    kernel.run('view = run.dashboard()\nview')
    kernel.restart()
    goes_on(run)
    kernel.run("from laminar_sdk.all import *\ncluster = Cluster.local()\nrun = Run.attach(cluster, 'kernel')\nview = run.dashboard()\nview")
    until(lambda: kernel.value('len(view.series.steps)') > 0)
    assert kernel.value("run.status()['state']") == 'running'
    until(lambda: kernel.value("view.controls.n.value") == 2) # the fields say what is
    for name, state in (('Pause', 'paused'), ('Resume', 'running')): # as the browser clicks: the effect is on the run
        kernel.click(kernel.value(f"view.controls.buttons['{name}'].model_id"))
        until(lambda: run.status()['state'] == state)
    kernel.run('view.controls.n.value = 3')
    kernel.click(kernel.value('view.controls.scale.model_id'))
    until(lambda: len(run.status()['manager']['rollouts']) == 3)
    until(lambda: kernel.value("2 in view.series.lanes.lanes and any('3 rollouts are wanted' in e.text for _, e in view.series.notices)"))
    ctrl_c_in_a_terminal_leaves_it_and_says_how_to_come_back('kernel')
    goes_on(run)
    kernel.run('run.stop()')
    until(lambda: kernel.value('view.series.state') == 'stopped' or not kernel.value('view.thread.is_alive()'))


    for cell in cells(model, tmp_path, 'end', 24): kernel.run(cell)
    kernel.manager.shutdown_kernel(now=True)
    run = Run.attach(cluster, 'end')
    assert run.status()['state'] in ('starting', 'running')
    _, counts, _ = finish(run)
    assert counts['train']['trained'] == 24 * 2 * 2
    from laminar_sdk.shells import names
    assert names('end/') == names('kernel/') == []


def ctrl_c_in_a_terminal_leaves_it_and_says_how_to_come_back(name):
    code = f"from laminar_sdk.all import *; Run.attach(Cluster.local(), {name!r}).wait()"
    script = subprocess.Popen([sys.executable, '-u', '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert 'reward' in until(lambda: next((line for line in script.stdout if 'reward' in line), ''))
    script.send_signal(signal.SIGINT)
    _, said = script.communicate(timeout=20)
    assert 'KeyboardInterrupt' in said and script.returncode and f"Run.attach(cluster, {name!r})" in said and f'laminar stop {name}' in said, said


def test_all_cells_twice(cluster, model, tmp_path, kernel):
    notebook = [*cells(model, tmp_path, 'twice', 3), 'view = run.dashboard()\nview', 'await run', 'last = run.status(); steps = len(run.history())']
    for folder in ('twice', 'twice-2'):
        for cell in notebook: kernel.run(cell)
        assert kernel.value("last['state'], last['step'], steps") == ['done', 3, 3]
        assert Path(kernel.value("last['run_dir']")).name == folder
        assert kernel.value("view.series.state, view.frozen") == ['done', True] # it has seen the end when the run has been awaited

    *before, fit = cells(model, tmp_path, 'busy', 1_000_000)
    kernel.run(fit)
    again = kernel.reply(kernel.send(fit))
    assert again['ename'] == 'RunError' and 'Run.attach' in again['evalue'], again

    waiting = kernel.send('await run')
    kernel.busy(waiting)
    time.sleep(.5)
    kernel.manager.interrupt_kernel()
    kernel.reply(waiting, 20)
    kernel.client.shutdown() # the polite way: it waits for every thread that is no daemon
    until(lambda: not kernel.manager.is_alive())
    from laminar_sdk.run import Run
    run = Run.attach(cluster, 'busy')
    goes_on(run)
    run.stop()
    Run(cluster, 'twice').close()


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_first_tutorial_twice_in_one_kernel(laminar_home, tmp_path, kernel):
    book = json.loads((ROOT/'tutorials'/'01_first_run.ipynb').read_text())
    code = [c for c in book['cells'] if c['cell_type'] == 'code']
    sources = ['steps = 3\nprompts_per_step = 4\nseed = 0' if 'parameters' in c['metadata'].get('tags', []) else ''.join(c['source']) for c in code]
    assert any(s.startswith('steps = 3') for s in sources)
    for _ in range(2):
        for source in sources: kernel.run(source, timeout=300)
        assert kernel.value('len(history)') == 3
