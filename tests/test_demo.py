"What the README promises of the demo: the whole command, three seeds one after the other; and how its model is made"
import json, subprocess, sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(1200)]
PROMISED = {'accuracy_before', 'accuracy_after', 'seconds', 'steps', 'staleness_mean', 'staleness_max', 'gen_tokens_per_s', 'train_tokens_per_s',
            'publish_stall_s', 'memcpy_s', 'trajectories', 'length_median', 'length_p99'}


@pytest.mark.parametrize('seed', range(3))
def test_the_demo_learns(seed, laminar_home, tmp_path, figures):
    command = [sys.executable, '-m', 'laminar_sdk.cli', 'demo', '--seed', str(seed), '--json']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    figures |= told | {'run_dir': None}
    assert PROMISED <= set(told) and told['audit'] == [] and told['state'] == 'done'
    assert told['accuracy_after'] - told['accuracy_before'] >= .25, told
    assert told['seconds'] <= 360, told
    assert told['length_p99'] >= 3*told['length_median'], told
    assert told['trajectories']['train']['trained'] == 80*16*8, told


def test_the_sample_model_is_made_in_three_minutes(tmp_path, figures):
    from laminar_sdk.sample_model import make_sample_model
    told = make_sample_model(tmp_path/'made')
    figures |= {key: told[key] for key in ('accuracy', 'greedy', 'seconds')}
    assert .4 <= told['accuracy'] <= .5 and told['seconds'] <= 180, figures
