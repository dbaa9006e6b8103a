"""The live view's script without a browser: its state and its drawings, run by the node that playwright brings."""
import json, subprocess, sys
from pathlib import Path
import msgspec, pytest

sys.path.append(str(Path(__file__).parent/'browser'))
import story
from laminar_sdk.core import events as ev
from laminar_sdk.notebook.charts import Series
from laminar_sdk.notebook.script import CHARTS, LANES, STATE
from laminar_sdk.notebook.view import SPEC, everything, news
from laminar_sdk.run import Run

RECORDED = Path(__file__).parent.parent/'tutorials'/'recorded_run'


@pytest.fixture(scope='module')
def node():
    playwright = pytest.importorskip('playwright')
    program = Path(playwright.__file__).parent/'driver'/'node'
    if not program.exists(): pytest.skip(f'playwright brings no node here: {program}')
    def run(script: str, *data) -> dict:
        source = STATE + LANES + CHARTS + f'const spec = {SPEC}, told = JSON.parse(require("fs").readFileSync(0))\n' + script
        done = subprocess.run([program, '--expose-gc', '-e', source], input=json.dumps(data, default=list), capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)
    return run


def told(x): return msgspec.json.decode(msgspec.json.encode(x))


def test_it_draws_what_was_recorded(node):
    records, s = Run.load(RECORDED).events(), Series()
    adds = [told(news(s, records[i:i + 50])) for i in range(0, len(records), 50)]
    got = node('''
        const [all, adds] = told, a = fresh(), b = fresh(); take(a, all); for (const d of adds) take(b, d)
        const of = s => [s.steps, s.evals, s.plans, [...s.done], s.work, s.spread, [...s.ended].map(([k, m]) => [k, Object.values(m).reduce((x, y) => x + y, 0)]).sort(), s.seq]
        const svg = lanes(a, null, 960), c = spec.charts.map(c => [c.id, traces(a, c)[0].some(t => t.x.length)])
        console.log(JSON.stringify({same: of(a).map((x, i) => JSON.stringify(x) == JSON.stringify(of(b)[i]) ? null : [i, x.slice(-2), of(b)[i].slice(-2)]).filter(x => x), arrows: svg.split('class="move"').length - 1, areas: svg.split('class="area"').length - 1, empty: c.filter(x => !x[1]).map(x => x[0]),
          ended: of(a)[6].reduce((x, y) => x + y[1], 0), others: others(a, spec).length, q: quantiles({8: 1, 16: 1, 24: 2}, [.5, .99]), svg}))''', told(everything(s)), adds)
    assert got['same'] == [], got['same']
    assert got['empty'] == ['pass'] and got['arrows'] == sum(len(p.source) for _, p in s.lanes.plans) and got['areas'] > 40
    assert got['ended'] == sum(s.ended.values()) and got['others'] > 3 and got['q'] == [3, 7]
    from xml.etree import ElementTree
    ElementTree.fromstring(got['svg'])


def test_one_of_k_answers_is_right(node):
    "A curve for each k, at the steps that were evaluated; figures of steps do not repeat it"
    s = Series()
    evals = [ev.EvalDone(i, i, .5, 10, samples=16, pass_at={1: .5, 4: .7 + i/100, 16: .9}) for i in (0, 20, 40)]
    step = ev.StepDone(20, {'step': 20, 'pass@4': .9, 'greedy_reward': .6, 'odd': 1.})
    d = told(news(s, [ev.Record('run', i, float(i), 0., e) for i, e in enumerate((*evals, step), 1)]))
    got = node('''const s = fresh(); take(s, told[0])
        const drawn = id => traces(s, spec.charts.find(c => c.id == id))[0].filter(t => t.x.length).map(t => [t.name, t.x, t.y])
        console.log(JSON.stringify({pass: drawn('pass'), reward: drawn('reward'), others: others(s, spec).map(c => c.title)}))''', d)
    assert got['pass'] == [['pass@1', [0, 20, 40], [.5]*3], ['pass@4', [0, 20, 40], [.7, .9, 1.1]], ['pass@16', [0, 20, 40], [.9]*3]] and got['others'] == ['odd']
    assert ['of greedy answers', [20], [.6]] in got['reward']


def test_a_notice_cannot_be_markup(node):
    s = Series()
    d = told(news(s, [ev.Record('run', 1, 1., 1., ev.PoolSeen.of([0], [1], [1], [.5])), ev.Record('run', 2, 2., 2., ev.Notice('warning', '</title><script>x</script>\u202e\x1b', 'rollout/0')),
                      ev.Record('run', 3, 3., 3., ev.PoolSeen.of([0], [1], [1], [.5]))]))
    svg = node('const s = fresh(); take(s, told[0]); console.log(JSON.stringify(lanes(s, 90, 900)))', d)
    assert '✕' in svg and '<script' not in svg and '\u202e' not in svg and '\x1b' not in svg


def test_ten_thousand_updates_leave_the_page_flat(node, figures):
    seconds = [told(news(Series(), [ev.Record('run', i, float(k), 0., e) for i, e in enumerate((*story.second(k, 64), story.step(k, story.random.Random(k))), 1)])) for k in range(100)]
    got = node('''
        const s = fresh(), at = []
        for (let k = 1; k <= 10000; k++) {
          const d = structuredClone(told[0][k % 100]); d.seq = k; d.t = k; for (const p of d.pool) p[0] = k; for (const w of d.work) w[0] = k; for (const m of d.steps) m.step = k
          take(s, d)
          if (k % 2000 == 0) { gc(); at.push(process.memoryUsage().heapUsed / 1e6) }
        }
        const began = performance.now(); for (let i = 0; i < 10; i++) lanes(s, null, 960)
        console.log(JSON.stringify({at, ms: (performance.now() - began) / 10, points: Math.max(...[...s.lanes.values()].map(p => p.length)), steps: s.steps.length}))''', seconds)
    figures.update(heap_MB=[round(x) for x in got['at']], lanes_ms=round(got['ms'], 1))
    assert got['points'] <= 2000 and got['steps'] <= 4000 and got['ms'] < 150 and got['at'][-1] < max(got['at'][1:3]) * 1.25 + 5


def test_the_whole_script_and_the_reports_are_well_formed(node, tmp_path):
    from laminar_sdk.notebook.report import _MODEL
    from laminar_sdk.notebook.script import SCRIPT
    program = Path(pytest.importorskip('playwright').__file__).parent/'driver'/'node'
    for name, text in (('view', SCRIPT), ('report', SCRIPT.replace('export default', 'const make =') + _MODEL)):
        (tmp_path/f'{name}.mjs').write_text(text)
        checked = subprocess.run([program, '--check', tmp_path/f'{name}.mjs'], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
