"One Jupyter and one Chromium for all tests of this folder"
import pytest
import lab


def pytest_collection_modifyitems(items):
    for item in items:
        if 'browser' in item.path.parts: item.add_marker(pytest.mark.skipif(bool(lab.SKIP), reason=lab.SKIP))


@pytest.fixture(scope='session')
def server(laminar_home, tmp_path_factory):
    s = lab.Server(tmp_path_factory.mktemp('jupyter'))
    yield s
    s.end()


@pytest.fixture(scope='module') # not longer: while it is there its event loop runs in this thread, and other tests run theirs
def browser():
    with lab.chromium() as b: yield b
