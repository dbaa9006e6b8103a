"The journal: what was acknowledged survives, all or none, whatever the rows"
import os, random, signal, sqlite3, subprocess, sys, threading, time
import msgspec, pytest
from hypothesis import given, settings, strategies as st
from laminar_sdk.core.errors import ConfigError, IntegrityError, MissingError, RunError
from laminar_sdk.data.journal import Journal


class Pair(msgspec.Struct):
    key: int
    value: int

class Twin(msgspec.Struct):
    key: int
    value: int

class Wide(msgspec.Struct):
    key: str
    state: str = 'new'
    n: int | None = None
    x: float = 0.
    flag: bool = False
    ids: list[int] = []
    by: dict[str, float] = {}
    maybe: list[int] | None = None
    raw: bytes = b''


WRITER = '''
import sys
sys.path.insert(0, {tests!r})
from test_data_journal import Journal, Pair, Twin
with Journal({path!r}) as j:
    n = max((r.value for r in j.rows(Pair)), default=-1) + 1
    while True:
        j.commit([x for k in range(20) for x in (Pair(k, n), Twin(k, n))])
        print(n, flush=True)
        n += 1
'''

def test_kill_9_between_and_in_commits(tmp_path):
    path, acknowledged, rng = tmp_path/'ledger.sqlite', -1, random.Random(0)
    for _ in range(4):
        p = subprocess.Popen([sys.executable, '-c', WRITER.format(tests=os.path.dirname(__file__), path=str(path))], stdout=subprocess.PIPE, text=True)
        first = int(p.stdout.readline())
        assert first in (acknowledged + 1, acknowledged + 2) # the commit in flight at the kill may or may not be there
        time.sleep(rng.uniform(0, .15))
        os.kill(p.pid, signal.SIGKILL)
        acknowledged = max([first, *map(int, p.stdout.read().split())])
        p.wait()
        with Journal(path) as j: # the dead writer's lock is gone
            pairs, twins = j.rows(Pair), j.rows(Twin)
            values = {r.value for r in [*pairs, *twins]}
            assert len(values) == 1 and values.pop() in (acknowledged, acknowledged + 1) # one transaction, whole
            assert len(pairs) == len(twins) == 20


texts, ints = st.text(st.characters(exclude_categories=['Cs']), max_size=8), st.integers(-2**63, 2**63 - 1)
wides = st.builds(Wide, key=st.sampled_from('abcdef'), state=texts, n=st.none() | ints, x=st.floats(allow_nan=False), flag=st.booleans(),
                  ids=st.lists(ints, max_size=4), by=st.dictionaries(texts, st.floats(allow_nan=False), max_size=3),
                  maybe=st.none() | st.lists(ints, max_size=3), raw=st.binary(max_size=8))

@settings(max_examples=15)
@given(st.lists(st.lists(wides, max_size=5), max_size=4))
def test_rows_come_back_as_they_were(tmp_path_factory, commits):
    path, model = tmp_path_factory.mktemp('j')/'l.sqlite', {}
    for rows in commits:
        with Journal(path) as j: j.commit(rows)
        model |= {r.key: r for r in rows}
    with Journal(path) as j:
        assert j.rows(Wide) == [model[k] for k in sorted(model)]
        assert sum(j.counts(Wide).values()) == len(model)


def test_the_ledgers_own_rows(tmp_path):
    books = pytest.importorskip('laminar_sdk.scheduling.books')
    rows = [books.TrajectoryRow(3, 1, 0, 2, state='running', lease=4), books.GroupRow(1, 0, 8), books.StepRow(1, 2), books.VersionRow(0, 0, 1),
            books.MetaRow('cursor', '{"at": 3}')]
    with Journal(tmp_path/'l.sqlite') as j:
        j.commit(rows)
        assert [r for t in map(type, rows) for r in j.rows(t)] == rows
        assert j.counts(books.TrajectoryRow) == {'running': 1}


def test_backup_while_others_commit_and_viewers_read(tmp_path):
    stop, n = threading.Event(), 0
    with Journal(tmp_path/'l.sqlite') as j:
        def write():
            nonlocal n
            while not stop.is_set():
                n += 1
                j.commit([Pair(1, n), Twin(1, n)])
        t = threading.Thread(target=write)
        t.start()
        try:
            while n < 5: time.sleep(.01)
            for i in range(5):
                before = n - 1
                j.backup(tmp_path/'copy.sqlite')
                with Journal(tmp_path/'copy.sqlite', read_only=True) as c:
                    (pair,), (twin,) = c.rows(Pair), c.rows(Twin)
                assert pair.value == twin.value >= before
        finally:
            stop.set()
            t.join()
    with Journal(tmp_path/'copy.sqlite') as c: c.commit([Pair(2, 0)]) # a run can go on from it


def test_errors_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(MissingError, match='run directory'): Journal(tmp_path/'none.sqlite', read_only=True)
    (tmp_path/'junk.sqlite').write_bytes(b'x' * 5000)
    with pytest.raises(IntegrityError, match='newest checkpoint'): Journal(tmp_path/'junk.sqlite')
    with pytest.raises(IntegrityError): Journal(tmp_path/'junk.sqlite') # the failed one holds no lock
    with Journal(tmp_path/'l.sqlite') as j:
        with pytest.raises(RunError, match='another process'): Journal(tmp_path/'l.sqlite', wait_s=.1)
    monkeypatch.setattr('laminar_sdk.data.rundir.filesystem', lambda *_: ('/home', 'nfs4'))
    with pytest.raises(ConfigError, match='nfs4'): Journal(tmp_path/'l.sqlite')


def test_a_full_disk_takes_nothing_and_later_everything(tmp_path):
    with Journal(tmp_path/'l.sqlite') as j:
        j.commit([Wide('a')])
        pages, = j.db.execute('PRAGMA page_count').fetchone()
        j.db.execute(f'PRAGMA max_page_count={pages + 1}')
        rows = [Wide('b', state='x' * 50_000), Wide('c')]
        with pytest.raises(RunError, match='full') as e: j.commit(rows)
        assert str(j.path) in str(e.value)
        assert j.rows(Wide) == [Wide('a')]
        j.db.execute('PRAGMA max_page_count=100000')
        j.commit(rows)
    with Journal(tmp_path/'l.sqlite') as j: assert len(j.rows(Wide)) == 3


def test_the_log_does_not_grow_without_end(tmp_path):
    "pitfall 20: a little every step"
    with Journal(tmp_path/'l.sqlite') as j:
        for i in range(400): j.commit([Pair(k, i) for k in range(200)])
        assert (tmp_path/'l.sqlite-wal').stat().st_size < 16 << 20
        assert (tmp_path/'l.sqlite').stat().st_size < 1 << 20
