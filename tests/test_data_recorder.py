"The flight recorder: a crash loses the unflushed and nothing else, and the numbers have no gaps"
import os, signal, subprocess, sys, time
from unittest.mock import patch
import pytest
from hypothesis import given, settings, strategies as st
from laminar_sdk.core.errors import IntegrityError, MissingError, RunError
from laminar_sdk.core.events import Notice, Progress, Tick
from laminar_sdk.data.recorder import Recorder, headers, read, segments

WRITER = '''
from laminar_sdk.core.events import Tick
from laminar_sdk.data.recorder import Recorder
r = Recorder({path!r}, dict(code='x'), segment_bytes=2000)
while True:
    for _ in range(7): last = r.record('manager', Tick(1.), t=1.).seq
    r.flush()
    print(last, flush=True)
'''

def test_kill_9(tmp_path):
    flushed = 0
    for _ in range(3):
        p = subprocess.Popen([sys.executable, '-c', WRITER.format(path=str(tmp_path))], stdout=subprocess.PIPE, text=True)
        first = int(p.stdout.readline())
        time.sleep(.05)
        os.kill(p.pid, signal.SIGKILL)
        rest = [int(s) for s in p.stdout.read().split('\n')[:-1]]
        p.wait()
        assert first > flushed
        flushed = max([first, *rest])
        found = [r.seq for r in read(tmp_path/'manager')]
        assert found == list(range(1, len(found) + 1)) and flushed <= len(found) <= flushed + 7
    assert len(segments(tmp_path/'manager')) > 3


steps = st.lists(st.sampled_from(['append', 'flush', 'die', 'close', 'tear']), max_size=25)

@settings(max_examples=60)
@given(steps, st.integers(1, 30), st.integers(1, 5), st.data())
def test_any_life(tmp_path_factory, steps, segment_bytes, tail, data):
    "Appends, flushes, deaths and torn ends in any order: what is read is the beginning of what was written, and `since` agrees with it"
    folder = tmp_path_factory.mktemp('r')
    make = lambda: Recorder(folder, {}, segment_bytes=segment_bytes * 40, tail=tail, fsync_s=None)
    rec, n, safe = make(), 0, 0 # appended; flushed
    for step in steps:
        if step == 'append':
            n += 1
            assert rec.record('run', Tick(float(n)), t=n).seq == n
            if n - safe >= rec.block: safe = n # a full block flushes itself
        elif step == 'flush': rec.flush()
        elif step == 'close': rec.close()
        if step in ('flush', 'close'): safe = n
        if step == 'tear' and safe and (paths := segments(folder/'run')):
            whole = paths[-1].read_bytes()
            paths[-1].write_bytes(whole[:data.draw(st.integers(0, len(whole)))])
            safe = max((r.seq for r in read(folder/'run')), default=0)
        if step in ('close', 'die', 'tear'):
            for s in rec._streams.values():
                if s.file: s.file.close() # the process is gone, and what it had in memory
            rec, n = make(), safe
        since = data.draw(st.integers(0, n + 1))
        expected = list(range(since + 1, n + 1))
        assert [r.seq for r in rec.since(since, 10, 'run')] == expected[:10]
        safe = max(safe, max((r.seq for r in read(folder/'run')), default=0)) # `since` may have flushed
        assert [r.seq for r in read(folder/'run', since)] == list(range(since + 1, safe + 1))
    rec.close()


def test_two_streams_whole_events_and_headers(tmp_path):
    event = Progress(1, [3], [2], [17], ['stop'], kv_used=.5)
    with Recorder(tmp_path, dict(code='a', config='b')) as rec:
        rec.record('manager', event, t=.5, wall=9.)
        rec.record('run', Notice('info', 'ö'), t=.5)
    (got,), (note,) = read(tmp_path/'manager'), read(tmp_path/'run')
    assert got.event == event and (got.t, got.wall, got.stream) == (.5, 9., 'manager') and note.event.text == 'ö'
    assert headers(tmp_path/'run') == [dict(format=1, stream='run', first_seq=1, code='a', config='b')]
    with pytest.raises(MissingError): list(read(tmp_path/'nowhere'))


def test_a_lost_segment_is_an_error_not_a_gap(tmp_path):
    for i in range(3):
        with Recorder(tmp_path, {}) as rec: rec.record('run', Tick(1.), t=1.)
    segments(tmp_path/'run')[1].unlink()
    with pytest.raises(IntegrityError, match='record 2 is missing'): list(read(tmp_path/'run'))


@pytest.mark.parametrize('fails', ['os.write', 'os.fsync'])
def test_a_full_disk_keeps_what_waits(tmp_path, fails):
    def full(*_): raise OSError(28, 'No space left on device')
    with Recorder(tmp_path, {}, fsync_s=0) as rec:
        rec.record('run', Tick(1.), t=1.)
        with patch(fails, full), pytest.raises(RunError, match='disk is full') as e: rec.flush()
        assert 'run' in str(e.value) and 'free some space' in str(e.value)
        rec.record('run', Tick(2.), t=2.)
        assert [r.seq for r in rec.since(0)] == [1, 2]
    assert [r.seq for r in read(tmp_path/'run')] == [1, 2]


def test_memory_is_bounded_without_a_flush(tmp_path):
    "pitfall 20"
    with Recorder(tmp_path, {}, tail=50, block=20) as rec:
        for i in range(500):
            rec.record('run', Tick(1.), t=1.)
            assert len(rec.stream('run').pending) <= 20
        assert [r.seq for r in rec.since(0, 1000)] == list(range(1, 501))
