"The tests' own machinery, run in a small project of its own: the choice of long tests, figures, what may not be left running"
import json, os, shutil, signal, subprocess, sys
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


@pytest.fixture
def project(tmp_path):
    for name in ('conftest.py', 'fixtures_cluster.py', 'processes.py', 'results.py'): shutil.copy(HERE/name, tmp_path)
    shutil.copy(HERE.parent/'pytest.ini', tmp_path)
    def run(source, *args):
        (tmp_path/'test_it.py').write_text(source)
        env = {key: value for key, value in os.environ.items() if key != 'LAMINAR_STEPS'}
        return subprocess.run([sys.executable, '-m', 'pytest', tmp_path, *args], cwd=tmp_path, env=env, capture_output=True, text=True)
    return run


def test_long_tests_are_left_out_and_sampled_by_date(project):
    def cases(*args):
        return {line.split()[0] for line in project(LONG, '-v', *args).stdout.splitlines() if 'test_long[' in line and 'PASSED' in line}
    assert cases() == set()
    first, again, other = (cases('--long-sample=0.05', f'--long-seed=2026-12-0{day}') for day in (1, 1, 2))
    assert first == again and len(first) == len(other) == 2 and first != other # a twentieth of 30, rounded up


def test_figures_go_to_a_file_that_names_no_machine(project, tmp_path):
    out = project(LONG, '-m', 'long', '--results', tmp_path/'results').stdout
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
