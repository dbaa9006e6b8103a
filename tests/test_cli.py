"""The `laminar` command, as a batch system would call it: real processes, emulated engines"""
import json, os, signal, subprocess, sys, time
from pathlib import Path

import psutil, pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
CONFIG = '''
model = "{model}"
[cluster]
name = "{cluster}"
hosts = 2
[relays]
keep = 3
[pool]
replicas = 2
max_model_len = 64
max_running = 8
engine = "emulated"
step_s = 0.005
[algorithm]
group_size = 2
lr = 1e-3
[sampling]
max_tokens = 30
[fit]
name = "{name}"
prompts = "{prompts}"
reward = "own_rewards:length"
steps = {steps}
prompts_per_step = 2
run_dir = "{folder}"
'''


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    "Writes a config with everything that it names"
    from laminar_sdk.training.policy import random_policy
    home = tmp_path_factory.mktemp('cli')
    p = random_policy()
    p.model.save_pretrained(home/'model')
    p.tokenizer.save_pretrained(home/'model')
    (home/'prompts.jsonl').write_text('\n'.join(json.dumps(dict(prompt=f'{a}+1=')) for a in range(10)))
    (home/'own_rewards.py').write_text('def length(completions, **kwargs): return [len(c) / 100 for c in completions]\n')
    def write(name, steps, cluster='default'):
        file = home/f'{name}.toml'
        file.write_text(CONFIG.format(model=home/'model', name=name, prompts=home/'prompts.jsonl', steps=steps, folder=home/'runs'/name, cluster=cluster))
        return file
    return write


def laminar(*args, check=0):
    "Run the command; with `--json` what it answers, which is all that the output holds"
    done = subprocess.run([sys.executable, '-m', 'laminar_sdk.cli', *map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == check, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout) if '--json' in args else done.stdout + done.stderr


def test_run_audit_report(cluster, config, tmp_path):
    s = laminar('run', config('batch', 3), '--json')
    assert s['state'] == 'done' and s['step'] == 3
    a = laminar('audit', s['run_dir'], '--json')
    assert a['findings'] == [] and a['trajectories']['train']['trained'] == 12
    laminar('report', s['run_dir'], '-o', tmp_path/'r.html', '--json')
    page = (tmp_path/'r.html').read_text()
    assert 'batch' in page and '<td>3</td>' in page
    assert laminar('status', '--json')['runs'] == []


def test_a_detached_run_is_found_on_whichever_cluster_it_lives(cluster, config):
    "Beside the session's own cluster, on a second one that this run starts"
    said = laminar('run', config('detached', 1000, 'second'), '--detach')
    assert 'laminar status detached' in said and "'second' stays up for 30 minutes" in said
    s = laminar('status', 'detached', '--json')
    assert s['state'] in ('starting', 'running') and s['steps'] == 1000 and s['cluster'] == 'second'
    assert 'no run' in (table := laminar('status')) and ' of 1,000' in table # the other cluster is listed too
    assert 'detached (on second)' in laminar('stop', 'nosuch', check=2)
    assert 'end it first: laminar stop detached' in laminar('shutdown', 'second', check=2)
    assert laminar('stop', 'detached', '--json')['state'] == 'stopped'
    assert laminar('shutdown', 'second', '--json')['runs'] == []


def test_sigterm_stops_the_run_in_order(cluster, config):
    from laminar_sdk.shells import names
    p = subprocess.Popen([sys.executable, '-m', 'laminar_sdk.cli', 'run', str(config('term', 1000))], stdout=subprocess.PIPE, text=True)
    for line in p.stdout:
        if line.split()[:1] == ['1']: break # the row of the first step
    p.send_signal(signal.SIGTERM)
    p.stdout.read()
    assert p.wait(60) == 143
    cluster.connect()
    assert names('term/') == []


@pytest.fixture
def complaint(monkeypatch, capfd, laminar_home):
    "Run the command in this process; what it complains of"
    from laminar_sdk import cli
    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['laminar', *map(str, args)])
        with monkeypatch.context() as m, pytest.raises(SystemExit) as e:
            m.setattr(sys, 'path', sys.path[:])
            cli.main()
        said = capfd.readouterr()
        assert e.value.code == 2 and 'Traceback' not in said.err and '→' in said.err
        return said.err + said.out
    return run


def test_errors_are_for_people(complaint, tmp_path):
    assert 'no config at' in complaint('run', tmp_path/'nothing.toml')
    assert 'is not a run directory' in complaint('audit', tmp_path)
    assert 'no notebook at' in complaint('export', tmp_path/'x.ipynb', '-o', tmp_path/'x.py')
    assert 'there is no folder /nonexistent' in complaint('report', tmp_path, '-o', '/nonexistent/x.html')
    assert "no model '/nonexistent'" in complaint('demo', '--model', '/nonexistent')
    assert '--model smollm2' in complaint('demo', '--data', 'foo')
    assert json.loads(complaint('audit', tmp_path, '--json').splitlines()[-1])['remedy'] == 'check the path'
    (tmp_path/'folder.ipynb').mkdir()
    assert 'folder.ipynb: Is a directory' in complaint('export', tmp_path/'folder.ipynb', '-o', tmp_path/'x.py') # nothing of ours had checked that


@pytest.mark.parametrize('right, wrong, said', [
    ('[fit]', '[fitt]', "'fitt', which is no section; did you mean 'fit'?"), ('steps = 3', 'stepz = 3', "[fit] has no key 'stepz'; did you mean 'steps'?"),
    ('replicas = 2', 'replicas = "two"', "[pool] replicas = 'two'"), ('group_size = 2', 'group_size = 0', 'GRPO.group_size = 0'),
    ('own_rewards:length', 'nomod:x', "there is no module 'nomod'"), ('own_rewards:length', 'own_rewards:lenght', "did you mean 'length'?"),
    ('prompts.jsonl', 'nothing.jsonl', 'there is no such file'), ('model = "', 'model = ', 'is no TOML: Invalid value (at line 2')])
def test_a_wrong_config_starts_nothing(right, wrong, said, complaint, config):
    file = config('wrong', 3, 'never')
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong, 1))
    assert said in complaint('run', file)
    from laminar_sdk import embedded
    assert 'never' not in embedded.names()


def test_an_interrupted_demo_says_what_was_stopped(laminar_home, tmp_path):
    "Ctrl-C while its cluster comes up; nothing is left, which the session's end checks"
    p = subprocess.Popen([sys.executable, '-m', 'laminar_sdk.cli', 'demo', '--runs', tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    began = time.monotonic()
    p.stdout.readline()
    assert 'Ctrl-C ends everything' in p.stdout.readline() and sum(psutil.Process(p.pid).cpu_times()[:2]) < 3 # s; alone, half a second
    while not [*(laminar_home/'clusters').glob('demo-*.json')] and time.monotonic() - began < 60: time.sleep(.05)
    p.send_signal(signal.SIGINT)
    _, said = p.communicate(timeout=120)
    assert not [*(laminar_home/'clusters').glob('demo-*.json')]
    assert p.returncode == 130 and 'Stopped:' in said and 'Traceback' not in said


def test_the_help_of_run_is_whole(capsys, monkeypatch):
    from laminar_sdk import cli, run_file
    monkeypatch.setattr(sys, 'argv', ['laminar', 'run', '--help'])
    with pytest.raises(SystemExit): cli.main()
    said = capsys.readouterr().out
    assert run_file.EXAMPLE in said and 'max_running = 64' in said and 'clip_high = 0.28' in said


def test_the_first_tutorial_is_a_script(tmp_path):
    tutorial = Path(__file__).parent.parent/'tutorials'/'01_first_run.ipynb'
    laminar('export', tutorial, '-o', tmp_path/'first.py', '--json')
    script = (tmp_path/'first.py').read_text()
    assert 'run.wait()' in script and 'await' not in script and 'dashboard' not in script
    said = subprocess.run([sys.executable, str(tmp_path/'first.py'), '--help'], capture_output=True, text=True).stdout
    assert '--steps' in said and '--seed' in said
