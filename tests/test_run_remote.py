"""A run on a cluster that was started apart, driven over ray:// from a process of its own, as from another machine"""
import os, subprocess, sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
CODE = '''
import sys, tempfile
from pathlib import Path
from laminar_sdk.all import *
from laminar_sdk.training.policy import random_policy
address, token, folder = sys.argv[1:]
model = Path(folder)/'model'
p = random_policy()
p.model.save_pretrained(model); p.tokenizer.save_pretrained(model)
def length(completions, **kwargs): return [len(c) / 100 for c in completions]
cluster = Cluster.attach(address, token=Path(token))
relays = RelayTier(cluster)
pool = RolloutPool(cluster, str(model), relays, replicas=1, max_model_len=64, max_running=8, engine='emulated', step_s=.005)
trainer = Trainer(cluster, str(model), relays, GRPO(group_size=2, lr=1e-3))
run = trainer.fit(pool, [dict(prompt='1+1=')] * 5, length, name='remote', steps=3, prompts_per_step=2, sampling=Sampling(max_tokens=30),
                  run_dir=f'{folder}/remote')
assert [r.name for r in Run.list(cluster)] == ['remote']
status = Run.attach(cluster, 'remote').wait(show=False)
assert status['state'] == 'done' and run.audit() == [], status
assert len(run.history()) == 3 and len(run.trajectories(4)) == 4
run.save_model(f'{folder}/out'); run.download(f'{folder}/copy'); run.report(f'{folder}/report.html')
run.stop()
assert Run.list(cluster) == []
past = Run.load(f'{folder}/copy')
assert past.audit() == [] and past.counts()['train']['trained'] == 12 and len(past.trajectories(12)) == 12
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(f'{folder}/out')
print('well done')
'''


def test_everything_over_ray_client(apart, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith('RAY_')}
    done = subprocess.run([sys.executable, '-c', CODE, apart.client_address, str(apart.token_path), str(tmp_path)], env=env,
                          capture_output=True, text=True, timeout=450)
    assert 'well done' in done.stdout, done.stdout[-3000:] + done.stderr[-4000:]
