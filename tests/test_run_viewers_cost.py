"""What viewers take from a run's throughput: the demo on real vLLM, in short blocks with three of them and with all three stopped, in the order A B B A.

Throughput is what comes of a CPU second of the run's own processes; wall time says as much about the machine. A block's CPU time depends most of all on how much was generated and trained in
it, so these are taken out by least squares; what is left for the viewers is a share with a confidence interval. The viewers' own processes stand for other machines: they count for nothing, and are `nice`.
The direct cost is that of the processes that serve viewers: the coordinator, and the data actor, which a status asks.
"""
import os, signal, time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import psutil
import pytest

from laminar_sdk.core import events as ev
from test_run_viewers import Viewer, watching

N, BLOCK_S, REST_S, FOURS = 3, 3., 1., int(os.environ.get('LAMINAR_VIEWER_FOURS', 12)) # viewers; a block, a rest after each; times A B B A


def cpu(pid: int) -> float:
    "CPU seconds of a process and all its threads, to the nanosecond"
    return time.clock_gettime((~pid << 3) | 2)


def family(s: dict) -> dict[str, list[int]]:
    "Processes: those that serve viewers, the rest of the run, Ray's own"
    own = [s['pid'], *(c['pid'] for c in s['children'].values())]
    below = [c.pid for p in own for c in psutil.Process(p).children(recursive=True)]
    raylet = psutil.Process(s['pid']).parent()
    serve = [s['pid'], s['children']['data/0']['pid']]
    beside = [p.pid for p in psutil.process_iter(['name', 'ppid']) if p.info['name'] in ('raylet', 'gcs_server') and p.info['ppid'] == raylet.ppid()]
    return dict(serve=serve, work=[p for p in {*own, *below} if p not in serve], ray=beside)


def blocks(run, viewers) -> list[dict]:
    "What each block took"
    pids, out = family(run.status()), []
    read = lambda: (time.time(), {k: sum(map(cpu, ps)) for k, ps in pids.items()})
    for looked in [1, 0, 0, 1] * FOURS:
        if not out or out[-1]['looked'] != looked:
            for v in viewers: v.signal(signal.SIGCONT if looked else signal.SIGSTOP)
        time.sleep(REST_S) # their last polls end, or they catch up
        (t, a), _, (u, b) = read(), time.sleep(BLOCK_S), read()
        out.append(dict(looked=looked, t=t, u=u, seconds=u - t, **{k: b[k] - a[k] for k in a}))
    return out


def work(run_dir) -> tuple[np.ndarray, np.ndarray]: # rows of from, to (s), tokens
    "Generated and trained tokens, spread over the time they were made in"
    from laminar_sdk.data.recorder import read
    made, trained, had, at = [], [], defaultdict(int), {}
    for r in read(run_dir/'events'/'manager'):
        if not isinstance(e := r.event, ev.Progress): continue
        new = sum(n - had[t] for t, n in zip(e.trajectory, e.tokens))
        had.update(zip(e.trajectory, e.tokens))
        if new > 0: made.append((max(at.get(e.rollout, r.wall), r.wall - 1.), r.wall, new))
        at[e.rollout] = r.wall
    for r in read(run_dir/'events'/'run'):
        if isinstance(e := r.event, ev.StepDone): trained.append((r.wall - e.metrics['seconds'], r.wall, e.metrics['tokens']))
    return np.array(made, float), np.array(trained, float)


def within(rows: np.ndarray, t: float, u: float) -> float:
    "Tokens between two moments"
    a, b, n = rows.T
    return float((n * np.clip((np.minimum(b, u) - np.maximum(a, t)) / np.maximum(b - a, 1e-9), 0, 1)).sum())


def least_squares(y: np.ndarray, *columns) -> tuple[float, float]: # the last column's factor, half of its 95 % interval
    x = np.stack(columns, axis=1)
    inverse, free = np.linalg.inv(x.T @ x), len(y) - x.shape[1]
    factors = inverse @ x.T @ y
    error = np.sqrt(((y - x @ factors) ** 2).sum() / free * inverse[-1, -1])
    return float(factors[-1]), float(error * 2.02) # Student's t of 40 blocks and more


def ratio(a: np.ndarray, b: np.ndarray, looked: np.ndarray) -> tuple[float, float]: # with ÷ without − 1, half of its 95 % interval
    "Of a/b, by drawing the fours again and again"
    rng, fours = np.random.default_rng(0), np.arange(len(a)).reshape(-1, 4)
    def of(i): return (a[i][looked[i]].sum() / b[i][looked[i]].sum()) / (a[i][~looked[i]].sum() / b[i][~looked[i]].sum()) - 1
    drawn = [of(fours[rng.integers(0, len(fours), len(fours))].ravel()) for _ in range(2_000)]
    return of(fours.ravel()), float(np.subtract(*np.percentile(drawn, [97.5, 2.5])) / 2)


def verdict(rows: list[dict], made, trained) -> dict:
    "Shares of the run, for one viewer"
    looked, seconds = np.array([r['looked'] for r in rows], bool), np.array([r['seconds'] for r in rows])
    gen, learned = (np.array([within(w, r['t'], r['u']) for r in rows]) for w in (made, trained))
    of = {k: np.array([r[k] for r in rows]) for k in ('serve', 'work', 'ray')}
    whole = of['serve'] + of['work']
    rate = whole.sum() / seconds.sum() # cores that the run uses
    share = lambda y: [round(x / rate / N, 5) for x in least_squares(y, gen, learned, seconds, seconds * looked)]
    each = lambda pair: [round(x / N, 5) for x in pair]
    return dict(blocks=len(rows), cores=round(rate, 3), generated_per_cpu_s=round(gen.sum() / whole.sum(), 1), trained_per_cpu_s=round(learned.sum() / whole.sum(), 1),
                of_the_run=dict(all=share(whole), serve=share(of['serve']), ray=share(of['ray'])),
                generated_and_trained_per_cpu_s=each(ratio(gen + learned, whole, looked)), generated_and_trained_per_s=each(ratio(gen + learned, seconds, looked)),
                serve_share_of_a_core=[round(x / N, 5) for x in least_squares(of['serve'], gen, learned, seconds, seconds * looked)])


@pytest.mark.parametrize('put_in', [0., .02])
def test_the_estimate_finds_what_was_put_in(put_in):
    "Forty-eight made-up blocks in which each viewer takes nothing, or two in a hundred"
    rng, rows = np.random.default_rng(1), []
    made, trained = (np.array([(t, t + 1., n) for t, n in enumerate(rng.uniform(*many, 250))]) for many in ((1000, 3000), (800, 2400)))
    for i, looked in enumerate([1, 0, 0, 1] * 12):
        t, u = 4. * i + 1., 4. * i + 4.
        took = 4e-4 * within(made, t, u) + 3e-4 * within(trained, t, u) + .2 + rng.normal(0, .03)
        rows.append(dict(looked=looked, t=t, u=u, seconds=3., work=took, serve=.1 + looked * put_in * N * 4.3 + rng.normal(0, .002), ray=.1))
    found = verdict(rows, made, trained)['of_the_run']
    for k in ('all', 'serve'): assert abs(found[k][0] - put_in) < .003 and found[k][1] < .003, (k, found)
    assert (found['all'][0] - found['all'][1] > .01) == (put_in > .01), found


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_three_viewers_take_of_the_demo(cluster, tmp_path, figures):
    from laminar_sdk.demo import arithmetic, start
    from laminar_sdk.core.config import GRPO
    task = arithmetic()
    task = replace(task, steps=1_000_000, eval_every=1_000_000, held_out=task.held_out[:16])
    cluster.connect()
    run = start(cluster, task, GRPO(group_size=task.group, lr=task.lr), 2, 'looked', 0, tmp_path/'looked', 'laminar', .25)
    run.set(lr=1e-9) # it shall do the same all the time
    while (s := run.status())['step'] < 3: assert s['state'] in ('starting', 'running') and time.sleep(.3) is None, s
    with watching('looked', N) as viewers:
        for v in viewers: psutil.Process(v.process.pid).nice(19)
        rows = blocks(run, viewers)
        heard = [len({at for at, _, _ in v.heard if any(r['looked'] and r['t'] <= at < r['u'] for r in rows)}) for v in viewers]
    run.stop()
    figures.update(verdict(rows, *work(tmp_path/'looked')), updates_per_s=round(sum(heard) / N / sum(r['seconds'] for r in rows if r['looked']), 2))
    took, unsure = figures['of_the_run']['serve']
    assert took + unsure <= .01, figures # the whole direct cost, with what is not known of it
    assert figures['of_the_run']['all'][0] - figures['of_the_run']['all'][1] <= .01, figures # and nothing speaks for an indirect one
