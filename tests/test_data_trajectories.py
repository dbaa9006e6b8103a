"The trajectory store: durable when flush returns, every id at most once in the Parquet files, at every moment"
import os, signal, subprocess, sys, threading, time
from unittest.mock import patch
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from pyarrow import parquet
from laminar_sdk.core.errors import MissingError, RunError
from laminar_sdk.core.types import Trajectory
from laminar_sdk.data.trajectories import TrajectoryStore, from_table, to_table


def make(i, lease=1, tokens=5, **more):
    return Trajectory(i, i // 4, i // 4, i % 4, lease=lease, columns=dict(answer=str(i), nested=dict(a=[1, None])), sampling=dict(temperature=1., seed=i),
                      prompt_ids=np.arange(3, dtype=np.int32), response_ids=np.arange(tokens, dtype=np.int32) + i,
                      logprobs=-np.arange(tokens, dtype=np.float32), loss_mask=np.ones(tokens, np.uint8), versions=[(0, 2), (3, 4)] if tokens else [],
                      finish_reason='stop', turn_spans=[(0, tokens)], rewards=dict(exact=1., other=None), reward=1. + lease, moves=2, **more)

def same(a, b):
    for name, v in vars(a).items():
        w = getattr(b, name)
        assert type(v) is type(w), name
        assert (v.dtype == w.dtype and np.array_equal(v, w)) if isinstance(v, np.ndarray) else v == w, (name, v, w)
    return True

def sealed_ids(folder): return [i for p in sorted(folder.glob('*.parquet')) for i in parquet.read_table(p, columns=['id'])['id'].to_pylist()]


def test_every_field_comes_back(tmp_path):
    some = [make(0), make(1, tokens=0), Trajectory(2, 0, 0, 0), make(3, kind='eval')]
    assert all(same(a, b) for a, b in zip(some, from_table(to_table(some)), strict=True))
    with TrajectoryStore(tmp_path) as s:
        s.add(some)
        s.flush()
    with TrajectoryStore(tmp_path) as s: assert all(same(a, b) for a, b in zip(some, s.fetch(range(4)), strict=True))
    from datasets import load_dataset
    rows = load_dataset('parquet', data_dir=str(tmp_path), split='train', cache_dir=str(tmp_path/'.cache'))
    assert sorted(rows['id']) == [0, 1, 2, 3] and rows[0]['versions'] == [dict(first=0, version=2), dict(first=3, version=4)]


steps = st.lists(st.one_of(st.tuples(st.just('add'), st.integers(0, 12), st.integers(1, 3)), st.tuples(st.sampled_from(
    ['flush', 'seal', 'die', 'tear', 'close', 'relog', 'release']))), max_size=20)

@settings(max_examples=40)
@given(steps, st.data())
def test_any_life(tmp_path_factory, steps, data):
    "Against a dict: flushed is kept through any death, an id is in the files at most once, the newest lease counts"
    with pytest.MonkeyPatch.context() as m:
        m.setattr('os.fsync', lambda fd: None) # nobody pulls the plug here, and it takes most of the time
        live(tmp_path_factory.mktemp('t'), steps, data)

def live(folder, steps, data):
    open_store = lambda: TrajectoryStore(folder, seal_rows=6, cache_bytes=2500, wait_s=0)
    s, waiting, safe = open_store(), {}, {}
    for step, *args in steps:
        if step == 'add':
            i, lease = args
            known = max(safe.get(i, 0), waiting.get(i, 0))
            assert s.add([make(i, lease)]) == (lease > known)
            if lease > known: waiting[i] = lease
        if step in ('flush', 'seal', 'close'):
            getattr(s, step)()
            safe, waiting = safe | waiting, {}
        if step == 'release': s.release(range(13))
        if step == 'relog': # dies between the sealed file's rename and the emptying of the log
            s.flush()
            safe, waiting, log = safe | waiting, {}, (folder/'.open.log').read_bytes()
            s.seal()
            (folder/'.open.log').write_bytes(log)
        if step == 'tear': (folder/'.000099.part').write_bytes(b'PAR1')
        if step in ('die', 'tear', 'relog', 'close'):
            if step != 'close': s._log.close() # and all memory is gone
            if step == 'tear':
                with open(folder/'.open.log', 'ab') as f: f.write(to_bytes_of_a_block()[:data.draw(st.integers(0, 300))])
            s, waiting = open_store(), {}
            assert not list(folder.glob('.*.part'))
        ids = sealed_ids(folder)
        assert len(ids) == len(set(ids)) and set(ids) <= set(safe)
        now = safe | waiting
        assert len(s) == len(now)
        for t in s.fetch(now): assert same(t, make(t.id, now[t.id]))
        assert {t.id: t.lease for t in s.last(99)} == now
        with pytest.raises(MissingError): s.fetch([99])
        assert {t.id: t.lease for t in TrajectoryStore(folder, read_only=True).last(99)} == safe
    s.close()
    assert sorted(sealed_ids(folder)) == sorted(safe | waiting)

def to_bytes_of_a_block():
    from laminar_sdk.data.trajectories import _to_block
    return _to_block([make(98)])


WRITER = '''
import numpy as np
from laminar_sdk.core.types import Trajectory
from laminar_sdk.data.trajectories import TrajectoryStore
def make(i): return Trajectory(i, i // 4, i // 4, i % 4, response_ids=np.arange(5, dtype=np.int32) + i)
s = TrajectoryStore({path!r}, seal_rows=40)
n = len(s)
while True:
    s.add(make(i) for i in range(n, n + 8))
    s.flush()
    n += 8
    print(n, flush=True)
'''

def test_kill_9_and_readers_at_any_moment(tmp_path):
    "A reader that lists and reads all the time never sees an id twice, and never fewer than before"
    have, stop, seen, wrong = 0, threading.Event(), [0], []
    def watch():
        while not stop.is_set():
            ids = sealed_ids(tmp_path)
            if len(ids) != len(set(ids)) or len(ids) < seen[-1]: wrong.append(ids)
            seen.append(len(ids))
            time.sleep(.002)
    reader = threading.Thread(target=watch)
    reader.start()
    for pause in (.2, .4):
        p = subprocess.Popen([sys.executable, '-c', WRITER.format(path=str(tmp_path))], stdout=subprocess.PIPE, text=True)
        first = int(p.stdout.readline())
        time.sleep(pause)
        os.kill(p.pid, signal.SIGKILL)
        acknowledged = max([first, *map(int, p.stdout.read().split('\n')[:-1])])
        p.wait()
        s = TrajectoryStore(tmp_path)
        assert acknowledged <= len(s) <= acknowledged + 8 and first > have
        have = len(s)
        assert [t.id for t in s.last(have)] == list(range(have)) and s.fetch([have - 1])[0].response_ids.tolist() == list(range(have - 1, have + 4))
        s._log.close()
    stop.set()
    reader.join()
    assert not wrong and seen[-1] > 0


@pytest.mark.parametrize('fails', ['os.write', 'os.fsync'])
def test_a_full_disk_loses_nothing(tmp_path, fails):
    def full(*_): raise OSError(28, 'No space left on device')
    with TrajectoryStore(tmp_path) as s:
        s.add([make(1)])
        s.flush()
        s.add([make(2)])
        with patch(fails, full), pytest.raises(RunError, match='disk is full') as e: s.flush()
        assert '.open.log' in str(e.value) and 'free some space' in str(e.value)
        with patch('os.replace', full), pytest.raises(RunError, match='parquet.*disk is full'): s.seal()
        assert [t.id for t in s.fetch([1, 2])] == [1, 2]
        s.seal()
    assert sorted(sealed_ids(tmp_path)) == [1, 2]


def test_one_writer(tmp_path):
    s = TrajectoryStore(tmp_path)
    with pytest.raises(RunError, match='another process'): TrajectoryStore(tmp_path, wait_s=.1)
    s.close()
    s.close()
    TrajectoryStore(tmp_path).close()
    with pytest.raises(MissingError): TrajectoryStore(tmp_path/'none', read_only=True)


def test_memory_is_bounded(tmp_path):
    "pitfall 20: the cache holds what it may, and all is still there"
    with TrajectoryStore(tmp_path, seal_rows=32, cache_bytes=50_000) as s:
        for g in range(60):
            s.add(make(i, tokens=100) for i in range(g * 8, g * 8 + 8))
            s.flush()
            assert s._cached <= 50_000 and len(s._open) < 40
        assert [t.id for t in s.fetch(range(0, 480, 7))] == list(range(0, 480, 7))
        s.release(range(480))
        assert s._cached == 0 and not s._cache
