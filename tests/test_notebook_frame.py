"""The live view's frame without a browser: its script runs in node, over a page of stubs, with the recorded run. What it looks like is seen in tests/browser."""
import json, subprocess
from pathlib import Path
import msgspec, pytest

from laminar_sdk.notebook.charts import PANELS, TABS, Series, points
from laminar_sdk.notebook.script import SCRIPT
from laminar_sdk.notebook.view import SPEC, everything
from laminar_sdk.run import Run

RECORDED = Path(__file__).parent.parent/'tutorials'/'recorded_run'
PAGE = r'''
class Element {
  constructor(tag) { Object.assign(this, {tag, kids: [], dataset: {}, style: {}, innerHTML: '', hidden: false, clientWidth: 960}); const on = new Set(); this.classList = {toggle: (c, yes) => yes ? on.add(c) : on.delete(c), contains: c => on.has(c)} }
  append(...k) { this.kids.push(...k) }
  replaceChildren(...k) { this.kids = k }
  all() { return this.kids.flatMap(k => k instanceof Element ? [k, ...k.all()] : []) }
  querySelectorAll(q) { return this.all().filter(e => q == e.tag || q == '.' + e.className) }
  querySelector(q) { return this.innerHTML.includes(q.slice(1, -1)) ? this : null }
  getBoundingClientRect() { return {left: 0, top: 0, width: 960, height: 500} }
  getRootNode() { return {elementFromPoint: () => under} }
  contains() { return true }
}
let under = null, plots = []
globalThis.window = globalThis; globalThis.getComputedStyle = () => ({color: 'black'}); globalThis.document = {createElement: t => new Element(t)}
globalThis.laminarPlotly = {Plotly: {react: (box, data, layout) => plots.push([box.dataset.chart, layout]), purge() {}}}
const told = JSON.parse(require('fs').readFileSync(0)), model = {get: k => told[k], on() {}, send() {}}, el = new Element('div'), view = make()
view.initialize({model}); view.render({model, el})
const root = el.kids[0], [, lane, grid, log] = root.kids, tip = root.kids.at(-1), rows = () => log.innerHTML.split('<tr').length - 2, at = plan => ({dataset: {plan, why: 'plan ' + plan}}), click = plan => ({target: {closest: () => at(plan)}})
'''


@pytest.fixture(scope='module')
def series():
    s = Series()
    for r in Run.load(RECORDED).events(): s.on(r)
    return s


@pytest.fixture(scope='module')
def frame(series):
    program = Path(pytest.importorskip('playwright').__file__).parent/'driver'/'node'
    if not program.exists(): pytest.skip(f'playwright brings no node here: {program}')
    def run(script: str) -> dict:
        told = dict(spec=SPEC, start=msgspec.json.encode(everything(series)).decode())
        done = subprocess.run([program, '-e', SCRIPT.replace('export default', 'const make =') + PAGE + script], input=json.dumps(told), capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)
    return run


def test_each_tab_draws_its_charts(frame, series):
    drawn = frame('''const out = {}; for (const b of root.querySelectorAll('.laminar-tab')) { plots = []; b.onclick(); out[b.kids[0]] = [plots.map(p => p[0]), grid.classList.contains('four'), plots.map(p => [p[1].xaxis.title.text, p[1].xaxis.title.font.size])] }
                     console.log(JSON.stringify(out))''')
    assert list(drawn) == list(TABS)
    for tab, (charts, four, titles) in drawn.items():
        known = [c['id'] for c in PANELS if c['tab'] == tab and (any(points(series, t)[0] for t in c['traces']) or c.get('counted') in ('lengths', 'versions', 'staleness'))]
        assert charts[:len(known)] == known and four == (len(charts) == 4) and all(text and size == 11 for text, size in titles), tab
        assert tab == 'Learning' or charts == known # the others are what no chart names
    assert len(drawn['Learning'][0]) > 12


def test_no_title_is_longer_than_a_chart():
    "At 1,100 pixels three charts stand side by side; the overview has two"
    assert [c['title'] for c in PANELS if len(c['title']) > (60 if c['tab'] == TABS[0] else 38)] == []


def test_a_plan_in_the_log_and_its_arrows_are_one(frame, series):
    plans = [p.plan for _, p in series.lanes.plans]
    got = frame('''const out = {before: rows(), arrow: lane.innerHTML.match(/<g class="move"[^>]*>/)[0], up: /data-why="[0-9.]+ s: rollout.0 is up/.test(lane.innerHTML)}
        under = {closest: () => at('%d')}; lane.onmousemove({clientX: 100, clientY: 50}); out.over = [tip.hidden, tip.textContent, root.classList.contains('pointing')]
        lane.onmouseleave(); out.left = [tip.hidden, root.classList.contains('pointing')]
        log.onclick(click('%d')); out.clicked = [rows(), log.innerHTML.includes('data-plan="%d"'), root.classList.contains('pointing')]
        log.onclick(click('%d')); out.again = [rows(), root.classList.contains('pointing')]
        console.log(JSON.stringify(out))''' % (plans[-1], plans[0], plans[0], plans[0]))
    assert got['before'] == 8 and 'data-why="plan' in got['arrow'] and 'trajectories of version' in got['arrow'] and got['up']
    assert got['over'] == [False, f'plan {plans[-1]}', True] and got['left'] == [True, False]
    assert got['clicked'] == [9, True, True] and got['again'] == [8, False] # one that is long out of the log comes back into it
