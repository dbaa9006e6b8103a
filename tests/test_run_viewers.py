"""Several viewers of one run, each a process of its own; one is stopped, one is killed, one has a browser that does not answer. Emulated engines; all else is real.

What they cost is measured in CPU time, which a busy machine does not change as much as wall time, in turns with them and with all of them stopped.
"""
import json, os, signal, subprocess, sys, threading, time
from contextlib import contextmanager

import psutil
import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.notebook.dashboard import Dashboard
from test_run import model, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(240)]
VIEWER = '''
import json, sys, time
from laminar_sdk.all import *
run = Run.attach(Cluster.local(), sys.argv[1])
view = run.dashboard()
add = view.view.add
def heard(records):
    add(records)
    print(json.dumps([time.time(), [(r.seq, r.wall) for r in records]]), flush=True)
view.view.add = heard
view.thread.join()
'''


class Viewer:
    "A kernel with a dashboard; `heard`: when it came, number, when it was said"

    def __init__(self, name):
        self.process = subprocess.Popen([sys.executable, '-c', VIEWER, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.heard, self.said = [], threading.Thread(target=self._listen, daemon=True)
        self.said.start()

    def _listen(self):
        for line in self.process.stdout:
            at, records = json.loads(line)
            self.heard += [(at, seq, wall) for seq, wall in records]

    def signal(self, s): self.process.send_signal(s)
    def lags(self, since: float) -> list[float]: return sorted(at - wall for at, _, wall in self.heard[:] if wall >= since)
    def end(self):
        self.process.kill()
        self.process.communicate()


@contextmanager
def watching(name, n):
    viewers = [Viewer(name) for _ in range(n)]
    try:
        for v in viewers: until(lambda: len(v.heard) > 3 or v.process.poll() is not None)
        assert all(v.process.poll() is None for v in viewers), [v.process.communicate()[1][-2000:] for v in viewers if v.process.poll() is not None]
        yield viewers
    finally:
        for v in viewers: v.end()


def lag(viewer, since: float) -> float:
    "Seconds from event to viewer, but for the worst one in twenty"
    lags = viewer.lags(since)
    assert len(lags) > 5, lags
    return lags[int(.95 * (len(lags) - 1))]


class Cost:
    "CPU seconds and generated tokens of a run, while it is looked at and while it is not"

    def __init__(self, run, s):
        self.run, self.coordinator = run, psutil.Process(s['pid'])
        self.others = [psutil.Process(c['pid']) for c in s['children'].values()]
        self.sums = {}

    def now(self):
        cpu = lambda p: sum(p.cpu_times()[:2])
        t, taken, others = time.monotonic(), cpu(self.coordinator), sum(map(cpu, self.others))
        steps = [r.event.metrics for r in self.run.events(max_items=100_000) if isinstance(r.event, ev.StepDone)]
        tokens = sum(m['gen_tokens_per_s'] * (m['t'] - before) for before, m in zip([0., *(m['t'] for m in steps)], steps))
        return t, taken, others, tokens

    def measure(self, what: str, seconds: float):
        before = self.now()
        time.sleep(seconds) # the question for tokens falls into it once
        self.sums[what] = [a + b - c for a, b, c in zip(self.sums.get(what, [0] * 4), self.now(), before)]

    def per_token_us(self, what: str) -> float: return 1e6 * self.sums[what][1] / self.sums[what][3]
    def share(self, what: str) -> float: return self.sums[what][1] / self.sums[what][0] # of a core
    def all_of_it(self, what: str) -> float: return sum(self.sums[what][1:3]) / self.sums[what][3]


def test_three_viewers_of_one_run_and_what_becomes_of_each(cluster, model, tmp_path, figures):
    run = start(cluster, model, tmp_path, 'viewers', steps=1_000_000, engine=dict(step_s=.02), n=4, group=4)
    s = running(run, 3)
    with watching('viewers', 3) as viewers:
        costs(run, s, viewers, figures)
        good, stopped, dead = viewers
        memory = psutil.Process(s['pid']).memory_info().rss
        stopped.signal(signal.SIGSTOP)
        dead.signal(signal.SIGKILL)
        deaf = Deaf(run)
        t = time.time()
        time.sleep(6)
        figures['lag_s_beside_a_stopped_a_dead_and_a_deaf_one'] = round(lag(good, t), 3)
        figures['coordinator_grew_MB'] = round((psutil.Process(s['pid']).memory_info().rss - memory) / 1e6, 1)
        assert lag(good, t) < 1 and figures['coordinator_grew_MB'] < 40
        assert 0 < deaf.sent <= 4, 'it is told no faster than it takes it'
        stopped.signal(signal.SIGCONT)
        newest = run.events(max_items=100_000)[-1].seq
        until(lambda: stopped.heard[-1][1] >= newest) # and it has missed nothing
        numbers = [seq for _, seq, _ in stopped.heard]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        deaf.close()
    until(lambda: run.status()['waiting'] == 0) # who has gone is not waited for
    assert running(run, run.status()['step'] + 2)['state'] == 'running'
    run.stop()
    assert run.audit() == []


def costs(run, s, viewers, figures):
    "In turns with three viewers and with all three stopped"
    cost, t = Cost(run, s), time.time()
    for _ in range(3):
        cost.measure('three', 4)
        for v in viewers: v.signal(signal.SIGSTOP)
        time.sleep(1.2) # their last polls end
        cost.measure('none', 4)
        for v in viewers: v.signal(signal.SIGCONT)
        time.sleep(1.)
    each = (cost.share('three') - cost.share('none')) / 3
    whole = cost.all_of_it('three') / cost.all_of_it('none') - 1
    figures.update(coordinator_us_per_token={k: round(cost.per_token_us(k), 1) for k in cost.sums}, coordinator_share_of_a_core={k: round(cost.share(k), 4) for k in cost.sums},
                   each_viewer_takes_of_a_core=round(each, 4), cpu_of_the_run_per_token_with_three=round(whole, 4), tokens_per_s={k: round(x[3] / x[0]) for k, x in cost.sums.items()})
    assert each < .01, figures # a core of the run's, and so of its throughput where that core is what limits it


class Deaf(Dashboard):
    "A viewer in this process, whose page takes two seconds for every message"

    def __init__(self, run):
        self.sent = 0
        super().__init__(run)
        send = self.view.widget.send
        def slow(*args):
            self.sent += 1
            time.sleep(2)
            send(*args)
        self.view.widget.send = slow
