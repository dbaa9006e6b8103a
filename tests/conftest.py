"""What every test may use: a home of its own, shared data, a place for figures; and the choice of long tests.
Standard library and pytest only, for `tests/gpu` runs on machines that have little else."""
import json, math, os, random, signal, tempfile, time
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
import pytest
import processes, results

signal.signal(signal.SIGINT, signal.default_int_handler) # a shell that runs us in the background may have us ignore Ctrl-C, and our children with us

pytest_plugins = ['fixtures_cluster']

SOCKET_PATH_MAX = 107 # bytes; Linux binds no unix socket to a longer path
BEGAN, TESTS = pytest.StashKey[float](), pytest.StashKey[dict]()

if find_spec('hypothesis'):
    from hypothesis import settings
    settings.register_profile('laminar', deadline=None, print_blob=True) # on shared cores a deadline measures the neighbours
    settings.load_profile('laminar')


@pytest.fixture(scope='session')
def laminar_home():
    "A short LAMINAR_HOME of this session's own; a process that outlives the session is an error"
    with tempfile.TemporaryDirectory(prefix='lmr-', ignore_cleanup_errors=True) as home, pytest.MonkeyPatch.context() as patch:
        room = SOCKET_PATH_MAX - len(os.fsencode(home))
        assert room > 80, f'{home} leaves {room} bytes for unix socket paths, 80 are needed: set TMPDIR to a shorter folder'
        patch.setenv('LAMINAR_HOME', home)
        yield Path(home)
        left = processes.end_leftovers(home)
    assert not left, f'left running at the end of the tests, now killed: {left}'


@pytest.fixture(scope='session')
def shared_data() -> Path:
    "The folder of small real data that the project does not hold"
    folder = Path(os.environ.get('LAMINAR_TEST_DATA', results.ROOT.parent/'shared'/'data'))
    if not folder.is_dir(): pytest.skip('no shared data beside the project: set LAMINAR_TEST_DATA to its folder')
    return folder


@pytest.fixture
def figures(request) -> dict:
    "The test's own dict of what it measured: `figures['tokens_per_s'] = 2140`; shown at the end, kept by `--results`"
    return request.config.stash[TESTS].setdefault(request.node.nodeid, dict(figures={}))['figures']


def pytest_addoption(parser):
    group = parser.getgroup('laminar')
    group.addoption('--long-sample', type=float, metavar='SHARE', help='share of the long tests to run (default 0; with -m long 1)')
    group.addoption('--long-seed', default=f'{datetime.now(timezone.utc):%F}', help='what chooses them (default: the date)')
    group.addoption('--results', type=Path, metavar='DIR', help='write outcomes and figures to DIR/<date>-<commit>.json')


def pytest_configure(config): config.stash[BEGAN], config.stash[TESTS] = time.monotonic(), {}


def pytest_collection_modifyitems(config, items):
    "Keeps a share of the long tests, rounded up, the same all day"
    share = config.getoption('long_sample')
    if share is None: share = float('long' in config.getoption('markexpr').replace('not long', ''))
    long = sorted(item.nodeid for item in items if item.get_closest_marker('long'))
    brief = [item.nodeid for item in items if (mark := item.get_closest_marker('long')) and mark.kwargs.get('sample', True)] # of minutes, not of a quarter of an hour
    n = math.ceil(len(long)*min(share, 1))
    chosen = long if share >= 1 else sorted(random.Random(config.getoption('long_seed')).sample(sorted(brief), min(n, len(brief))))
    out = [item for item in items if item.nodeid in set(long) - set(chosen)]
    for item in items:
        if item.nodeid in chosen and not item.get_closest_marker('timeout'): item.add_marker(pytest.mark.timeout(1800))
    if out: config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
    config.long_tests = [f'long tests: {len(chosen)} of {len(long)}, seed {config.getoption("long_seed")}', *chosen]


def pytest_report_collectionfinish(config): return config.long_tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == 'call' or report.skipped or report.failed:
        test = item.config.stash[TESTS].setdefault(item.nodeid, dict(figures={}))
        test.update(outcome=report.outcome, seconds=round(call.duration, 2))
    return report


def pytest_terminal_summary(terminalreporter, config):
    "Figures, and the steps that `make test` took before this one"
    tests, say = config.stash[TESTS], terminalreporter.write_line
    if any(test['figures'] for test in tests.values()): terminalreporter.section('figures')
    for nodeid, test in tests.items():
        if test['figures']: say(f'{nodeid}: {json.dumps(test["figures"], default=float)}')
    if tests and config.getoption('results'): say(f'written: {results.write(config.getoption("results"), tests)}')
    if steps := Path(os.environ.get('LAMINAR_STEPS', os.devnull)).read_text():
        seconds = time.monotonic() - config.stash[BEGAN]
        together = seconds + sum(float(row.split()[1]) for row in steps.splitlines() if not row.startswith('install'))
        terminalreporter.section('steps')
        say(f'{steps}{"pytest":<12}{seconds:8.1f} s\n{"tests":<12}{together:8.1f} s  (installation apart)')
