"The tests' own machinery, run in a small project of its own: the choice of long tests, figures, what may not be left running"
import json, os, re, shutil, signal, subprocess, sys, time
from pathlib import Path
import pytest
import processes

HERE = Path(__file__).parent
LONG = '''
import pytest
@pytest.mark.long
@pytest.mark.parametrize('case', range(30))
def test_long(case, figures): figures['case'] = case
def test_short(): assert True
'''

ENV = {key: value for key, value in os.environ.items() if key != 'LAMINAR_STEPS'}


@pytest.fixture
def project(tmp_path):
    for name in ('conftest.py', 'fixtures_cluster.py', 'processes.py', 'results.py'): shutil.copy(HERE/name, tmp_path)
    shutil.copy(HERE.parent/'pytest.ini', tmp_path)
    def run(source, *args):
        (tmp_path/'test_it.py').write_text(source)
        return subprocess.run([sys.executable, '-m', 'pytest', tmp_path, *args], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    return run


def test_long_tests_are_left_out_and_sampled_by_date(project):
    def cases(*args):
        return {line.split()[0] for line in project(LONG, '-v', *args).splitlines() if 'test_long[' in line and 'PASSED' in line}
    assert cases() == set()
    first, again, other = (cases('--long-sample=0.05', f'--long-seed=2026-12-0{day}') for day in (1, 1, 2))
    assert first == again and len(first) == len(other) == 2 and first != other # a twentieth of 30, rounded up


def test_figures_go_to_a_file_that_names_no_machine(project, tmp_path):
    out = project(LONG, '-m', 'long', '--results', tmp_path/'results')
    path, = (tmp_path/'results').glob('*.json')
    content = json.loads(path.read_text())
    assert len(content['tests']) == 30 and content['tests']['test_it.py::test_long[7]']['figures'] == {'case': 7}
    assert set(content['machine']) == {'cpu', 'cores', 'memory_gib', 'load', 'kernel', 'python'}
    assert os.uname().nodename not in path.read_text() and str(tmp_path) not in path.read_text() and 'written: ' in out


def test_a_process_left_running_is_found_and_ended(tmp_path):
    sleeper = subprocess.Popen(['sleep', '60'], env=os.environ | {'LAMINAR_HOME': str(tmp_path)}, start_new_session=True)
    assert processes.end_leftovers(str(tmp_path/'other'), patience_s=0) == {}
    assert processes.end_leftovers(str(tmp_path), patience_s=0.3) == {sleeper.pid: 'sleep 60 '}
    assert sleeper.wait(30) == -signal.SIGKILL and processes.alive(str(tmp_path)) == {}


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\n' + text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    "A project in which each step of `make test` is a few lines, and the notebooks have workers that would go on for ever"
    for name in ('scripts/test.sh', 'tests/processes.py', 'tests/conftest.py', 'tests/fixtures_cluster.py', 'tests/results.py', 'pytest.ini'):
        (tmp_path/name).parent.mkdir(exist_ok=True)
        shutil.copy(HERE.parent/name, tmp_path/name)
    (tmp_path/'Makefile').write_text('check style:\n\t@echo $@ is well\n')
    for name in ('scripts/venv.sh', 'scripts/browser.sh'): script(tmp_path/name, 'true')
    script(tmp_path/'.venv/bin/python', f'exec {sys.executable} "$@"')
    script(tmp_path/'.venv/bin/nbdev_test', 'echo notebooks\n')
    (tmp_path/'scripts'/'tutorials.py').write_text('print("tutorials")')
    (tmp_path/'tests'/'test_it.py').write_text('def test_it(): pass\n')
    def begin(*args): return subprocess.Popen(['scripts/test.sh', *args], cwd=tmp_path, env=ENV | {'TMPDIR': str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    begin.folder = tmp_path
    return begin


def test_every_step_is_in_the_table_and_pytest_has_the_last_word(checkout):
    script(checkout.folder/'.venv'/'bin'/'nbdev_test', 'echo a notebook fails; exit 1\n')
    done = checkout()
    said = done.communicate()[0]
    *_, line, verdict = said.splitlines()
    assert done.returncode == 1 and '1 passed' in line and verdict == 'make test: FAILED: kernels', said
    assert re.findall(r'^(\w+) +[0-9.]+ s  (\w+)$', said, re.M) == [('install', 'ok'), ('check', 'ok'), ('style', 'ok'), ('browser', 'ok'), ('kernels', 'FAILED')], said
    assert end_of(lambda: not [*checkout.folder.glob('lmr-*')])


def end_of(condition, seconds=30):
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until: time.sleep(.05)
    return found


STUCK = """import os, time
from pathlib import Path
Path({0!r}).write_text(str(os.getpid()))
time.sleep(600)
"""

@pytest.mark.parametrize('where', ['notebooks', 'pytest'])
@pytest.mark.parametrize('sig', [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_an_interrupted_make_test_has_started_ends_with_it(checkout, where, sig):
    marks = [checkout.folder/name for name in (['worker', 'tutorial'] if where == 'notebooks' else ['test'])]
    if where == 'notebooks':
        for mark in marks: (checkout.folder/f'{mark.name}.py').write_text(STUCK.format(str(mark)))
        script(checkout.folder/'.venv'/'bin'/'nbdev_test', f'{sys.executable} {checkout.folder}/worker.py &\nwait\n')
        shutil.copy(checkout.folder/'tutorial.py', checkout.folder/'scripts'/'tutorials.py')
    else: (checkout.folder/'tests'/'test_it.py').write_text('def test_it(): exec(' + repr(STUCK.format(str(marks[0]))) + ')\n')
    tests = checkout()
    pids = [int(end_of(lambda: mark.exists() and mark.read_text(), 200)) for mark in marks]
    tests.send_signal(sig)
    assert tests.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(sig, -sig)
    assert end_of(lambda: not any(Path(f'/proc/{pid}').exists() for pid in pids)), pids
    assert end_of(lambda: not [*checkout.folder.glob('lmr-*')]), 'its homes are taken away'
    tests.stdout.close()
