"""What can be seen without a run: the tutorial's recording, text that means harm, plain pages, Notebook 7, dark, the report."""
import shutil
from pathlib import Path
import pytest
import lab, likeness

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
TUTORIALS = Path(__file__).parent.parent.parent/'tutorials'
LOAD = f'''
from laminar_sdk.run import Run
run = Run.load({str(TUTORIALS/"recorded_run")!r})
'''
DRAWN = "() => document.querySelectorAll('.laminar-chart:not([hidden]) .main-svg').length >= 3 && document.querySelector('g.move') && document.querySelector('.laminar').dataset.steps >= 20"


def test_the_tutorial_runs_and_its_replay_can_be_pulled(server, browser):
    shutil.copytree(TUTORIALS/'recorded_run', server.folder/'recorded_run', dirs_exist_ok=True)
    shutil.copy(TUTORIALS/'02_watch_a_run.ipynb', server.folder/'watch.ipynb')
    page = lab.Page(browser, server).open('watch.ipynb').run()
    page.until(DRAWN, 60)
    page.until("() => !document.querySelector('.jp-InputPrompt')?.innerText.includes('*')", 60)
    assert 'Error' not in page.outputs() and page.errors == []
    before = page.page.evaluate("() => +document.querySelector('.laminar').dataset.seq")
    handle = page.page.locator('.noUi-handle').first
    handle.focus()
    for _ in range(12): handle.press('PageDown')
    page.until("n => +document.querySelector('.laminar').dataset.seq < n", arg=before)
    page.close()


def test_text_that_means_harm_changes_nothing_outside_its_cell(server, browser, tmp_path):
    cells = f'''
import numpy as np
from laminar_sdk.core.types import Trajectory
from laminar_sdk.data.trajectories import TrajectoryStore
from laminar_sdk.notebook.charts import Series
from laminar_sdk.notebook.view import LiveView, look_up
from laminar_sdk.readable import Readable, rows_of, reading_of
from laminar_sdk.core import events as ev
BAD = ['<script>window.harm = 1</script>', '<img src=x onerror="window.harm = 1">', '\\x1b[31m\\x1b[2J', '\\u202e\\u2066backwards', '</div></table></body>', 'x' * 10_000_000, '"><svg onload=window.harm=1>']
class Bad(Readable):
    name = BAD[0]
    def __init__(self):
        self.store = TrajectoryStore({str(tmp_path)!r})
        self.store.add(Trajectory(i, 1, 1, 0, columns={{BAD[1]: BAD[0]}}, prompt_ids=np.full(40, i % len(BAD), np.int32), response_ids=np.full(200, i % len(BAD), np.int32), logprobs=-np.ones(200, np.float32),
                                  loss_mask=np.array([1, 0] * 100, np.uint8), versions=[(0, 1)], finish_reason='stop', rewards={{BAD[0]: 1.}}, reward=1.) for i in range(14))
        self.store.flush()
    def decode(self, ids): return ''.join(BAD[i][:200_000] if len(ids) > 1 else BAD[i] for i in ids)
    def _rows(self, last, group): return rows_of(self.store, self.decode, last, group)
    def _reading(self, id): return reading_of(self.store, self.decode, id)
bad = Bad()
''', '''
series = Series()
for i, e in enumerate([ev.StepDone(1, {'step': 1, '<img src=x onerror=window.harm=1>': 1.}), ev.Notice('warning', BAD[0] + BAD[3], 'rollout/0'), ev.PoolSeen.of([0], [1], [1], [.5])], 1): series.on(ev.Record('run', i, float(i), 0., e))
view = LiveView(series, look_up(bad))
view.widget
''', 'bad.browse()', 'bad.trajectory(6)', "from IPython.display import HTML\nHTML('<i id=after>after' + '</i>')"
    server.write('harm.ipynb', *cells)
    page = lab.Page(browser, server, height=3000).open('harm.ipynb').run()
    page.until("() => document.querySelector('#after')", 60)
    page.until("() => document.querySelector('.laminar')")
    page.page.locator('button.laminar-tab:text-is("Trajectories")').click()
    page.until("() => document.querySelectorAll('.laminar-rows tbody tr').length == 14")
    for i in range(7):
        page.page.locator(f'.laminar-rows tr[data-id="{i}"]').click()
        page.until("i => document.querySelector('.laminar-page b')?.textContent == 'trajectory ' + i", arg=str(i))
    page.page.locator('button.laminar-tab:text-is("Learning")').click()
    page.page.wait_for_timeout(1_000)
    page.keep('harm')
    assert page.page.evaluate('() => window.harm') is None and page.errors == []
    assert page.page.evaluate("() => document.querySelectorAll('.laminar script, .laminar img, .jp-OutputArea-output script').length") == 0
    wide = page.page.evaluate("() => [...document.querySelectorAll('.laminar')].every(e => e.scrollWidth <= e.clientWidth + 2) && document.body.scrollWidth <= window.innerWidth")
    assert wide and page.page.evaluate("() => getComputedStyle(document.querySelector('#after')).direction") == 'ltr'
    page.close()


def test_a_plain_page_gets_a_plain_view(server, browser):
    "As in VS Code, Colab and marimo, forced here: nothing but what ipywidgets itself brings"
    server.write('plain.ipynb', LOAD, '''
from laminar_sdk.notebook.dashboard import Dashboard
class Living:
    "The recorded run as if it were still alive"
    name, config = run.name, run.config
    def status(self): return dict(steps=40)
    def events(self, since, max_items=1000, wait_s=0.):
        import time; time.sleep(.2)
        return [r for r in run.events(since, 50) if type(r.event).__name__ != 'RunEnded']
view = Dashboard(Living(), plain=True)
view
''')
    page = lab.Page(browser, server).open('plain.ipynb').run()
    page.until("() => document.querySelector('.widget-html svg path') && document.querySelectorAll('.widget-html svg text').length > 20", 40)
    page.until("() => document.body.innerText.includes('rollout/1')")
    assert page.count('.laminar') == 0 and page.errors == []
    page.keep('plain')
    page.close()


def test_notebook_7(browser, laminar_home, tmp_path_factory):
    server = lab.Server(tmp_path_factory.mktemp('notebook7'), 'notebook')
    try:
        server.write('seven.ipynb', LOAD, 'run.dashboard()')
        page = lab.Page(browser, server).open('seven.ipynb').run()
        page.until(DRAWN, 60)
        page.keep('notebook-7')
        assert [e for e in page.errors if 'schema' not in e] == [] # Notebook's own
        page.close()
    finally: server.end()


def test_dark_and_narrow_are_readable_and_look_as_they_did(server, browser):
    server.write('dark.ipynb', LOAD, 'run.dashboard()')
    page = lab.Page(browser, server, width=1100).open('dark.ipynb')
    page.page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.run()
    page.until(DRAWN, 60)
    page.page.locator('button.laminar-span:text-is("all")').click()
    page.page.wait_for_timeout(800)
    page.keep('dark')
    light = page.page.evaluate("() => getComputedStyle(document.querySelector('.laminar')).color.match(/\\d+/g).slice(0, 3).map(Number)")
    ink = page.page.evaluate("() => getComputedStyle(document.querySelector('.laminar-chart text')).fill.match(/\\d+/g).slice(0, 3).map(Number)")
    assert min(light) > 150 and min(ink) > 150 and page.errors == [] # light ink on the dark page, in the charts too
    assert page.page.evaluate("() => document.querySelector('.laminar-grid').getBoundingClientRect().width / document.querySelector('.laminar-chart').getBoundingClientRect().width") > 1.8 # two in a row
    likeness.alike(page.page, 'dark')
    page.page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    page.close()


def test_the_report_is_the_same_view_in_one_file(browser, tmp_path):
    from laminar_sdk.run import Run
    file = Run.load(TUTORIALS/'recorded_run').report(tmp_path/'report.html')
    page = browser.new_page(viewport=dict(width=1100, height=1500))
    asked, errors = [], []
    page.on('request', lambda r: asked.append(r.url))
    page.on('pageerror', lambda e: errors.append(str(e)))
    page.goto(file.as_uri())
    page.wait_for_function(DRAWN, timeout=30_000)
    for tab in ('Learning', 'Throughput', 'Overview'): page.locator(f'button.laminar-tab:text-is("{tab}")').click()
    assert [u for u in asked if not u.startswith(('file:', 'data:', 'blob:'))] == [] and errors == []
    page.close()
