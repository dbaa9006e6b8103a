"""What the live view is told, from the events of a real run that was recorded; and that a view may stay open for weeks."""
import math, sys
from collections import Counter
from pathlib import Path
import msgspec, pytest

sys.path.append(str(Path(__file__).parent/'browser'))
import story
from laminar_sdk.core import events as ev
from laminar_sdk.notebook.charts import PANELS, Series, points
from laminar_sdk.notebook.digest import Digest, digest
from laminar_sdk.notebook.view import everything, news
from laminar_sdk.run import Run

RECORDED = Path(__file__).parent.parent/'tutorials'/'recorded_run'


@pytest.fixture(scope='module')
def records(): return Run.load(RECORDED).events()


@pytest.fixture(scope='module')
def series(records):
    s = Series()
    for r in records: s.on(r)
    return s


def of(records, kind): return [r for r in records if isinstance(r.event, kind)]


@pytest.mark.parametrize('chart', [c for c in PANELS if c['traces']], ids=lambda c: c['id'])
def test_each_curve_shows_what_was_recorded(chart, records, series):
    for trace in chart['traces']:
        x, y = points(series, trace)
        assert len(x) == len(y) and all(math.isfinite(v) for v in y), (chart['id'], trace['name'])
        if trace['from'] == 'steps':
            told = [(r.event.step, r.event.metrics[trace['key']]) for r in of(records, ev.StepDone) if r.event.metrics.get(trace['key']) is not None]
            assert list(zip(x, y)) == told
        if trace['from'] == 'work': assert len(x) <= len(of(records, ev.WorkSeen)) and x == sorted(x)


    assert any(points(series, t)[0] for t in chart['traces']), 'nothing to show'


def test_what_is_counted_adds_up(records, series):
    ended = sum(n for r in of(records, ev.WorkSeen) for *_, n in r.event.ended)
    assert sum(series.ended.values()) == ended > 500
    stale = Counter(v for r in of(records, ev.StepDone) for v, n in enumerate(r.event.metrics['staleness_counts']) for _ in range(n))
    assert sum(stale.values()) == sum(r.event.metrics['trajectories'] for r in of(records, ev.StepDone))
    assert max(stale) == max(r.event.metrics['staleness_max'] for r in of(records, ev.StepDone))


def test_piece_by_piece_and_all_at_once_tell_the_same(records, series):
    s, told = Series(), Counter()
    for i in range(0, len(records), 37):
        d = news(s, records[i:i + 37])
        for k in ('steps', 'evals', 'plans', 'done', 'marks', 'spread'): told[k] += len(d.get(k, []))
        for v, e, b, n in d.get('ended', []): told['ended'] += n
    all_ = everything(s)
    assert all_ == everything(series) and msgspec.json.decode(msgspec.json.encode(all_))['seq'] == records[-1].seq
    for k in ('steps', 'evals', 'plans', 'done', 'marks', 'spread'): assert told[k] == len(all_[k]), k
    assert told['ended'] == sum(n for *_, n in all_['ended'])


def test_a_digest_of_a_short_run_is_the_run(records, series):
    s = Series()
    for r in digest(records): s.on(r)
    assert len(s.steps) == len(series.steps) and len(s.lanes.plans) == len(series.lanes.plans) and sum(s.ended.values()) == sum(series.ended.values()) and s.seq == series.seq


@pytest.mark.parametrize('updates', [2_500, pytest.param(10_000, marks=pytest.mark.long)]) # most of them come after what is kept at most
def test_updates_leave_memory_flat(updates, figures):
    import psutil
    s, d, me, seq, at = Series(updates*4//10, updates*15//100), Digest(), psutil.Process(), 0, {}
    for k in range(updates):
        new = []
        for e in (*story.second(k, 64), story.step(k, story.random.Random(k)), ev.Notice('info', f'number {k}')):
            seq += 1
            new.append(ev.Record('run', seq, float(k), 0., e))
        news(s, new)
        for r in new: d.add(r)
        if (k + 1) % (updates//10) == 0: at[k + 1] = me.memory_info().rss / 1e6
    figures['rss_MB'] = {k: round(v) for k, v in at.items()}
    assert at[updates] - at[updates*6//10] < 2 + 6*updates/10_000 and len(msgspec.json.encode(everything(s))) < 3_000_000, at
