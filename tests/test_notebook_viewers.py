"""Whoever watches is not felt: many viewers, one that wants ten hours at once, one that has died. The coordinator's tape and long poll, without Ray."""
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace
import pytest

sys.path.append(str(Path(__file__).parent/'browser'))
import story
from laminar_sdk.core import events as ev
from laminar_sdk.coordinator import Coordinator
from laminar_sdk.tape import Tape

HEADER = dict(code_version='story')


@pytest.fixture(scope='module')
def hours(tmp_path_factory): return story.record_hours(tmp_path_factory.mktemp('hours'), hours=4)


async def lags(until: asyncio.Future, every_s: float = .005) -> list[float]:
    "How late the event loop was, again and again, until something is done"
    late = []
    while not until.done():
        t = time.perf_counter()
        await asyncio.sleep(every_s)
        late.append(time.perf_counter() - t - every_s)
    return late


def test_one_that_wants_hours_at_once_holds_up_nobody(hours, figures):
    async def watch():
        tape = Tape(hours, HEADER)
        last = tape.recorder.seq('run')
        quick = asyncio.create_task(tape.since(last, 10, 60.))
        t = time.perf_counter()
        slow = asyncio.create_task(tape.since(0, 1_000_000, 0.))
        late = asyncio.create_task(lags(slow))
        await asyncio.sleep(.02)
        said = time.perf_counter()
        tape.append('run', ev.Notice('info', 'news'))
        news = ev.decode_records(await quick)
        heard = time.perf_counter() - said
        packed, late = await slow, sorted(await late)
        took, past = time.perf_counter() - t, ev.decode_records(packed)
        tape.close()
        assert [r.event.text for r in news] == ['news'] and news[0].seq == last + 1
        assert [r.seq for r in past[:last]] == list(range(1, last + 1)) and last > 28_000
        figures.update(records=last, seconds=round(took, 2), turns=len(late), heard_ms=round(1000 * heard, 1), loop_late_ms_median=round(1000 * late[len(late) // 2], 1), loop_late_ms_worst=round(1000 * late[-1], 1))
        assert len(late) > 4 and late[len(late) // 2] < .05 and heard < max(.5, took / 4), figures # the loop had its turn all the while
    asyncio.run(watch())


def test_a_hundred_wait_and_all_hear_it_and_one_that_gives_up_is_dropped(tmp_path, figures):
    async def watch():
        tape = Tape(tmp_path, HEADER)
        cpu = time.process_time()
        polls = [asyncio.create_task(tape.since(0, 1000, 30.)) for _ in range(101)]
        await asyncio.sleep(1.)
        figures['waiting_ms_of_cpu_per_s'] = round(1000 * (time.process_time() - cpu), 1)
        assert tape.waiting == 101
        polls.pop().cancel() # its process has died, and Ray has noticed
        t = time.perf_counter()
        tape.append('run', ev.Notice('info', 'news'))
        told = await asyncio.gather(*polls)
        figures['heard_ms'] = round(1000 * (time.perf_counter() - t), 1)
        assert figures['heard_ms'] < 1000 and {len(ev.decode_records(b)) for b in told} == {1} and tape.waiting == 0
        with pytest.raises(asyncio.TimeoutError): await asyncio.wait_for(tape.since(1, 10, 30.), .05)
        assert tape.waiting == 0
        assert await tape.since(1, 10, .05) == b'\x90' and tape.waiting == 0 # its time was up
        tape.close()
    asyncio.run(watch())


def test_no_poll_waits_for_longer_than_half_a_minute():
    asked = []
    async def since(*args): asked.append(args)
    asyncio.run(Coordinator.events(SimpleNamespace(asked=0., tape=SimpleNamespace(since=since)), 7, 10, 1e9))
    assert asked == [(7, 10, 30.)]
