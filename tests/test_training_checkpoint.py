"Killed at any moment while it saves, a run finds a whole checkpoint, and it is not an older one than was acknowledged"
import json, multiprocessing as mp, os, random, signal, time
from pathlib import Path

import numpy as np
import pytest
import torch

from laminar_sdk.core.config import GRPO
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.checkpoint import MANIFEST, begin, check, checkpoints, load, newest_valid, save, tensors_of
from laminar_sdk.training.policy import random_policy


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worker(seed=0): return ActorWorker(random_policy(seed=seed), algorithm=GRPO(lr=1e-3), device='cpu')


def mark(w, step):
    "Fill a worker with numbers that only this step has"
    for m in w.masters.masters: m.fill_(step)
    w.masters.round_()
    w.updates = step


def save_for_ever(folder, first, acknowledged):
    torch.set_num_threads(1)
    w = worker()
    for step in range(first, 10**6):
        mark(w, step)
        save(folder, w, step, dict(cursor=16*step), keep=2)
        acknowledged.value = step


def test_kill_at_any_moment(tmp_path, figures):
    context = mp.get_context('forkserver') # loaded once; each victim is forked from it
    context.set_forkserver_preload(['laminar_sdk.training.checkpoint', 'transformers.models.qwen2.modeling_qwen2'])
    rng, w, newest, met = random.Random(0), worker(), 0, set()
    for kill in range(10):
        acknowledged = context.Value('q', newest)
        victim = context.Process(target=save_for_ever, args=(str(tmp_path), newest + 1, acknowledged), daemon=True)
        victim.start()
        until = time.monotonic() + 60
        while acknowledged.value < newest + 2: # it is in its loop
            assert victim.is_alive() and time.monotonic() < until
            if acknowledged.value == newest: began = time.monotonic()
            time.sleep(.001)
        time.sleep(rng.random()*(time.monotonic() - began)) # somewhere in the time that one or two saves take
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        assert victim.exitcode == -signal.SIGKILL
        met |= {p.name.split('.', 1)[1] for p in tmp_path.glob('*.tmp')}
        found, notes = newest_valid(tmp_path)
        assert notes == [] and len(checkpoints(tmp_path)) >= 2
        manifest = load(found, w)
        assert manifest['step'] >= acknowledged.value and manifest['extra'] == dict(cursor=16*manifest['step'])
        assert w.updates == manifest['step'] and all((m == manifest['step']).all() for m in w.masters.masters)
        newest = manifest['step']
    figures.update(kills=10, saves=newest, left_behind=sorted(met))
    assert 'tmp' in met # at least one was killed in the middle of a save: else this proves nothing


@pytest.mark.parametrize('fault', ['flip', 'cut', 'gone', 'manifest gone', 'manifest cut', 'other format'])
def test_a_damaged_checkpoint_is_not_believed(tmp_path, fault):
    w = worker()
    for step in (1, 2): save(tmp_path, w, step)
    bad = tmp_path/'step-000002'
    files = sorted(p for p in bad.rglob('*') if p.is_file() and p.name != MANIFEST)
    file = files[sum(map(ord, fault)) % len(files)]
    if fault == 'flip': file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    if fault == 'cut': os.truncate(file, file.stat().st_size - 1)
    if fault == 'gone': file.unlink()
    if fault == 'manifest gone': (bad/MANIFEST).unlink()
    if fault == 'manifest cut': os.truncate(bad/MANIFEST, 100)
    if fault == 'other format': (bad/MANIFEST).write_text(json.dumps(json.loads((bad/MANIFEST).read_text()) | dict(format=99)))
    found, notes = newest_valid(tmp_path)
    assert found.name == 'step-000001' and len(notes) == 1 and 'step-000002' in notes[0]


def test_a_bit_that_flips_in_the_manifest_is_seen(tmp_path):
    "Be it in a checksum, in the step, in the cursor or in a key: the older one is used, or nothing that is said has changed"
    w = worker()
    for step in (1, 2): save(tmp_path, w, step, dict(ledger_sequence=123, prompt_cursor=dict(position=7)))
    file, rng = tmp_path/'step-000002'/MANIFEST, random.Random(0)
    good, said = file.read_bytes(), check(tmp_path/'step-000002')
    places = [good.index(x) + len(x) - 1 for x in (b'"step": 2', b'"position": 7', b'"group_size": 8', b'"updates": 0', b'"nbytes', b'"files', b'"seal')]
    for i in places + rng.sample(range(len(good)), 60):
        file.write_bytes(good[:i] + bytes([good[i] ^ 1 << rng.randrange(7)]) + good[i + 1:])
        found, notes = newest_valid(tmp_path)
        assert (found.name, len(notes)) == ('step-000001', 1) or i not in places and check(found) == said, (i, good[i - 20:i + 20]) # 1e-6 or 1E-6


def test_killed_between_two_renames_the_one_that_stepped_aside_is_there(tmp_path, monkeypatch):
    "A step is saved again, and of one checkpoint that is kept nothing older is there"
    w, rename = worker(), Path.rename
    save(tmp_path, w, 5, dict(first=True), keep=1)
    def killed(self, target):
        if Path(target).name == 'step-000005': raise KeyboardInterrupt
        return rename(self, target)
    with monkeypatch.context() as m:
        m.setattr(Path, 'rename', killed)
        with pytest.raises(KeyboardInterrupt): save(tmp_path, w, 5, keep=1)
    found, notes = newest_valid(tmp_path)
    assert notes == [] and load(found, worker())['extra'] == dict(first=True)
    begin(tmp_path, 6) # and a save that is killed does not take it along
    assert newest_valid(tmp_path) == (tmp_path/'step-000005', [])
    save(tmp_path, w, 5, dict(second=True), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ['step-000005'] and check(tmp_path/'step-000005')['extra'] == dict(second=True)


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    from laminar_sdk.training import checkpoint
    w = worker()
    save(tmp_path, w, 1)
    written = []
    def full(tensors, path, **_):
        Path(path).write_bytes(b'half')
        written.append(path)
        if len(written) == 2: raise OSError(28, 'No space left on device')
    monkeypatch.setattr(checkpoint, 'save_file', full)
    with pytest.raises(OSError, match='No space'): save(tmp_path, w, 2)
    assert [p.name for p in tmp_path.iterdir()] == ['step-000001'] and newest_valid(tmp_path)[1] == []


def test_every_tensor_of_the_worker_comes_back(tmp_path):
    from test_training_actor import trajectories
    a, b = worker(1), worker(2)
    for s in range(3): a.step(trajectories(seed=s))
    load(save(tmp_path, a, 3), b)
    for file, tensors in tensors_of(a).items():
        back = tensors_of(b)[file]
        assert tensors.keys() == back.keys() and all(torch.equal(x, back[n]) for n, x in tensors.items())
    assert torch.equal(torch.cat([p.flatten() for p in a.model.parameters()]), torch.cat([p.flatten() for p in b.model.parameters()]))
    for s in (7, 8):
        assert a.step(trajectories(seed=s))['loss'] == b.step(trajectories(seed=s))['loss']
    assert all(torch.equal(x, y) for x, y in zip(a.masters.masters, b.masters.masters))


def test_no_pickle_in_a_checkpoint(tmp_path):
    for p in save(tmp_path, worker(), 1).rglob('*'):
        assert p.is_dir() or p.suffix in ('.json', '.safetensors', '.jinja'), p
