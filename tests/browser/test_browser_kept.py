"""Pictures that a person has looked at, and whether the view still looks like them: the recorded run and a story of sixty-four rollouts, from one HTML file each.

That another font is no change, and that each piece that is gone is one, is tried with every picture.
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
def files(tmp_path_factory):
    "The recorded run, and five minutes of sixty-four rollouts with two repacks and a death"
    from laminar_sdk.notebook.report import html
    from laminar_sdk.run import Run
    said = [(float(k), e) for k in range(300) for e in story.second(k, 64)]
    said += [(100., ev.Repacked(1, 'look', 4, 9, [3, 17, 40], [30, 18, 41], [1, 1, 1], [9, 4, 7], [.05, .04, .06], [.4, .3, .5], [.45, .34, .56])), (104., ev.RepackDone(1, 20, 0, 3, 51_200)),
             (200., ev.Repacked(2, 'look', 2, 3, [50], [2], [3], [12], [.08], [.3], [.38])), (230., ev.Notice('warning', 'rollout/9: its process died; its trajectories are placed again', 'rollout/9')),
             (260., ev.Notice('info', 'rollout/9 is up; it took 12 s', 'rollout/9'))]
    folder = tmp_path_factory.mktemp('kept')
    (folder/'many.html').write_text(html('sixty-four', dict(steps=10), [ev.Record('run', i, t, t, e) for i, (t, e) in enumerate(sorted(said, key=lambda x: x[0]), 1)]))
    return dict(many=folder/'many.html', recorded=Run.load(RECORDED).report(folder/'recorded.html'))


def opened(browser, file, tab: str = 'Overview'):
    "A page at a tab, everything drawn, nothing that moves"
    page = browser.new_page(viewport=dict(width=1100, height=1500))
    page.goto(file.as_uri())
    page.wait_for_function("() => document.querySelector('.laminar')?.dataset.plotly == 1", timeout=30_000)
    page.locator(f'button.laminar-tab:text-is("{tab}")').click()
    if tab == 'Overview': page.locator('button.laminar-span:text-is("all")').click()
    if tab == 'Trajectories':
        page.locator('.laminar-rows tbody tr').nth(2).click()
        page.wait_for_function("() => document.querySelector('.laminar-page bdi')")
    page.mouse.move(1, 1)
    settle(page)
    return page


def settle(page):
    "Until two looks are the same"
    before = None
    while (now := page.evaluate("() => { window.scrollTo(0, 0); return document.querySelector('.laminar').innerHTML.length + ' ' + document.querySelectorAll('.main-svg').length }")) != before:
        before = now
        page.wait_for_timeout(500)


def styled(page, css: str):
    "What it looks like with one rule more"
    page.add_style_tag(content=css)
    try: return likeness.look(page)
    finally: page.evaluate('() => document.head.lastElementChild.remove()')


def without(piece: str) -> str: # CSS
    return (f'.laminar-{piece} *' if piece in ('lanes', *likeness.INK) else f'[data-chart="{piece}"] .trace, [data-chart="{piece}"] .traces') + ' { visibility: hidden !important }'


@pytest.mark.parametrize('name', [*TABS, 'many'])
def test_it_looks_as_it_did(browser, files, figures, name):
    page = opened(browser, files.get(name, files['recorded']), TABS.get(name, 'Overview'))
    likeness.alike(page, name)
    then = likeness.kept(name)
    font = max(likeness.differences(styled(page, FONT % '"DejaVu Serif", serif'), then).values())
    gone = {piece: likeness.differences(styled(page, without(piece)), then)[piece] for piece in then[1]}
    figures.update(another_font=round(font, 2), gone={k: round(d, 2) for k, d in gone.items()})
    assert font < likeness.MOST < min(gone.values()), figures
    page.close()


def test_a_plan_in_the_log_and_its_arrows_are_one(browser, files):
    page = opened(browser, files['recorded'])
    on = "() => [...document.querySelectorAll('[data-plan].on')].map(e => e.tagName.toLowerCase() + e.dataset.plan).sort()"
    page.locator('g.move').last.hover(force=True)
    plan = page.locator('g.move').last.get_attribute('data-plan')
    assert page.evaluate(on) == sorted({f'g{plan}', f'tr{plan}'}) and 'trajectories of version' in (tip := page.locator('.laminar-tip').inner_text()) and f'plan {plan} at' in tip
    page.locator('.laminar-log tr[data-plan]').nth(3).click()
    other = page.locator('.laminar-log tr[data-plan]').nth(3).get_attribute('data-plan')
    page.mouse.move(1, 1)
    assert {x.lstrip('gtr') for x in page.evaluate(on)} == {other} != {plan} and page.locator('.laminar.pointing').count() == 1
    page.locator('g.move').first.click(force=True) # long out of the log
    first = page.locator('g.move').first.get_attribute('data-plan')
    assert page.locator(f'.laminar-log tr[data-plan="{first}"]').count() == 1 and page.locator('.laminar-log tr[data-plan]').count() == 9
    page.locator('button.laminar-span:text-is("90 s")').click()
    page.locator('path.area').first.hover(force=True)
    assert 'trajectories, KV cache' in page.locator('.laminar-tip').inner_text()
    page.close()
