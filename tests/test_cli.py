"""The `laminar` command, as a batch system would call it: real processes, emulated engines"""
import json, os, signal, subprocess, sys, time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]
CONFIG = '''
model = "{model}"
[cluster]
name = "default"
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
    def write(name, steps):
        file = home/f'{name}.toml'
        file.write_text(CONFIG.format(model=home/'model', name=name, prompts=home/'prompts.jsonl', steps=steps, folder=home/'runs'/name))
        return file
    return write


def laminar(*args, check=0):
    "Run the command; its last line, if that is JSON"
    done = subprocess.run([sys.executable, '-m', 'laminar_sdk.cli', *map(str, args)], capture_output=True, text=True, timeout=150)
    assert done.returncode == check, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ''
    return json.loads(last) if '--json' in args else done.stdout + done.stderr


def test_run_audit_report(cluster, config, tmp_path):
    s = laminar('run', config('batch', 3), '--json')
    assert s['state'] == 'done' and s['step'] == 3
    a = laminar('audit', s['run_dir'], '--json')
    assert a['findings'] == [] and a['trajectories']['train']['trained'] == 12
    laminar('report', s['run_dir'], '-o', tmp_path/'r.html', '--json')
    page = (tmp_path/'r.html').read_text()
    assert 'batch' in page and '<td>3</td>' in page
    assert laminar('status', '--json')['runs'] == []


def test_status_and_stop_of_a_detached_run(cluster, config):
    assert laminar('run', config('detached', 1000), '--detach', '--json') == {'run': 'detached'}
    s = laminar('status', 'detached', '--json')
    assert s['state'] in ('starting', 'running') and s['steps'] == 1000
    assert [r['name'] for r in laminar('status', '--json')['runs']] == ['detached']
    assert laminar('stop', 'detached', '--json')['state'] == 'stopped'
    assert laminar('status', '--json')['runs'] == []


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


def test_errors_are_for_people(tmp_path):
    assert 'no config at' in laminar('run', tmp_path/'nothing.toml', check=2)
    (tmp_path/'bad.toml').write_text('model = "m"\n[fitt]\n')
    assert "unknown ['fitt']" in laminar('run', tmp_path/'bad.toml', check=2)
    assert 'is not a run directory' in laminar('audit', tmp_path, check=2)
    assert 'no notebook at' in laminar('export', tmp_path/'x.ipynb', '-o', tmp_path/'x.py', check=2)


def test_the_first_tutorial_is_a_script(tmp_path):
    tutorial = Path(__file__).parent.parent/'tutorials'/'01_first_run.ipynb'
    laminar('export', tutorial, '-o', tmp_path/'first.py', '--json')
    script = (tmp_path/'first.py').read_text()
    assert 'run.wait()' in script and 'await' not in script and 'dashboard' not in script
    said = subprocess.run([sys.executable, str(tmp_path/'first.py'), '--help'], capture_output=True, text=True).stdout
    assert '--steps' in said and '--seed' in said
