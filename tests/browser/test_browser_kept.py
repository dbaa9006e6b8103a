"""Pictures that a person has looked at, and whether the view still looks like them: the recorded run and a story of sixty-four rollouts, from one HTML file each.

That another font is no change, and that each chart that is gone is one, is tried with every picture.
"""
from pathlib import Path
import pytest
import likeness, story
from laminar_sdk.core import events as ev

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
RECORDED = Path(__file__).parent.parent.parent/'tutorials'/'recorded_run'
TABS = dict(overview='Overview', learning='Learning', lengths='Lengths and staleness', throughput='Throughput', trajectories='Trajectories')
FONT = '.laminar, .laminar *, .laminar text { font-family: %s !important }'


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
    from laminar_sdk.run import Run
    return Run.load(RECORDED).report(tmp_path_factory.mktemp('kept')/'recorded.html')


@pytest.fixture(scope='module')
def many(tmp_path_factory):
    "Five minutes of sixty-four rollouts, two repacks and a death"
    from laminar_sdk.notebook.report import html
    said = [(float(k), e) for k in range(300) for e in story.second(k, 64)]
    said += [(100., ev.Repacked(1, 'look', 4, 9, [3, 17, 40], [30, 18, 41], [1, 1, 1], [9, 4, 7], [.05, .04, .06], [.4, .3, .5], [.45, .34, .56])), (104., ev.RepackDone(1, 20, 0, 3, 51_200)),
             (200., ev.Repacked(2, 'look', 2, 3, [50], [2], [3], [12], [.08], [.3], [.38])), (250., ev.Notice('warning', 'rollout/9: its process died; its trajectories are placed again', 'rollout/9'))]
    records = [ev.Record('run', i, t, t, e) for i, (t, e) in enumerate(sorted(said, key=lambda x: x[0]), 1)]
    file = tmp_path_factory.mktemp('kept')/'many.html'
    file.write_text(html('sixty-four', dict(steps=10), records))
    return file


def opened(browser, file, tab: str):
    "A page at a tab, everything drawn, nothing that moves"
    page = browser.new_page(viewport=dict(width=1100, height=1500))
    page.goto(file.as_uri())
    page.wait_for_function("() => document.querySelector('.laminar')?.dataset.plotly == 1", timeout=30_000)
    page.locator(f'button.laminar-tab:text-is("{tab}")').click()
    if tab == 'Overview': page.locator('button.laminar-span:text-is("all")').click()
    if tab == 'Trajectories':
        page.locator('.laminar-rows tbody tr').nth(2).click()
        page.wait_for_function("() => document.querySelector('.laminar-page bdi')")
    settle(page)
    return page


def settle(page):
    "Until two looks are the same"
    before = None
    while (now := page.evaluate("() => { window.scrollTo(0, 0); return document.querySelector('.laminar').innerHTML.length + ' ' + document.querySelectorAll('.main-svg').length }")) != before:
        before = now
        page.wait_for_timeout(500)
