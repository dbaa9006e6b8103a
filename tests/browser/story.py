"""A run that is only told: sixty-four rollouts, recorded by the real recorder and asked by the real long poll, without anything behind it.

It runs in the kernel of the notebook that watches it.
"""
import asyncio, random, threading, time
from pathlib import Path

from laminar_sdk.core import events as ev

FIGURES = {k: .1 for k in ('loss entropy kl_k1 kl_k3 grad_norm logprob_gap_mean logprob_gap_max clip_fraction_low clip_fraction_high ratio_mean ratio_max reward lr seconds wait_s '
                           'publish_stall_s memcpy_s gen_tokens_per_s tokens_per_s staleness_mean reward_std padding_waste').split()}


def second(k: int, lanes: int, per_step: int = 45):
    "What a run of that size says in its k-th second"
    r = random.Random(k)
    version = k // per_step
    yield ev.PoolSeen.of(list(range(lanes)), [max(0, version - i % 3) for i in range(lanes)], [100] * lanes, [.1 + .8 * ((k + 3 * i) % 60) / 60 for i in range(lanes)])
    yield ev.WorkSeen(version, 64, 20, 1e5 * r.random(), {b: r.randrange(50) for b in range(40, 100)}, [(version, b % 2 == 0, b, 1) for b in range(60, 63)], [(version, 8, r.random(), 1 << 20)])
    if k % per_step == per_step - 1: yield step(k // per_step + 1, r)


def step(n: int, r) -> ev.StepDone:
    lengths = dict(length_p10=100., length_median=400. + r.random(), length_p90=1500., length_p99=4000.)
    return ev.StepDone(n, dict(step=n, staleness_max=2, staleness_counts=[50, 70, 8], t=float(n)) | {k: v * (1 + r.random()) for k, v in FIGURES.items()} | lengths)


def record_hours(folder, hours: float = 10., lanes: int = 64):
    "A run's `events/run`, ten hours of it: a hundred thousand answers in 800 steps"
    from laminar_sdk.data.recorder import Recorder
    with Recorder(Path(folder), dict(code_version='story')) as rec:
        for k in range(int(hours * 3600)):
            for e in second(k, lanes): rec.record('run', e, float(k), float(k))
    return Path(folder)


class Live:
    "A run that says something twice a second; the coordinator's tape, and its long poll, in a thread"
    name = 'story'

    def __init__(self, folder, every_s: float = .5, lanes: int = 64):
        from laminar_sdk.tape import Tape
        self.folder, self.every_s, self.lanes, self.k, self.told = Path(folder), every_s, lanes, 0, {}
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        threading.Thread(target=self._run, args=(Tape,), daemon=True).start()
        self.ready.wait()

    def _run(self, Tape):
        asyncio.set_event_loop(self.loop)
        self.tape = Tape(self.folder, dict(code_version='story'))
        self.ready.set()
        self.loop.run_forever()

    def go(self): self._ask(self._start())
    async def _start(self): self.task = self.loop.create_task(self._speak())
    async def _speak(self):
        while True:
            self.k += 1
            for e in (*second(self.k, self.lanes, 1 << 30), step(self.k, random.Random(self.k))): last = self.tape.append('run', e)
            self.told[last.seq] = time.time()
            await asyncio.sleep(self.every_s)

    def _ask(self, coro): return asyncio.run_coroutine_threadsafe(coro, self.loop).result(60)
    def status(self): return dict(steps=100_000)
    def events(self, since, max_items=1000, wait_s=0.): return ev.decode_records(self._ask(self.tape.since(since, max_items, wait_s)))

    def glance(self): return ev.decode_records(self._ask(self.tape.glance()))
