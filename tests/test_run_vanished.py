"""A coordinator that cannot come back: who waits hears it and why, nothing stays behind, and the run can be gone on with. Emulated engines; Ray, kills and damage are real."""
import asyncio, os, signal, threading, time
from pathlib import Path

import pytest

from laminar_sdk.core.errors import IntegrityError, MissingError, RunError
from test_run import model, running, start, until # noqa: F401 (a fixture)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
PATIENCE_S = 120 # from a kill to the last word, on a machine that has other things to do


class Waiting:
    "Somebody who waits in a thread, until an exception"

    def __init__(self, wait):
        self.wait, self.error = wait, None
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self):
        try: self.wait()
        except Exception as e: self.error = e

    def hears(self) -> Exception:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), f'it still waits after {PATIENCE_S} s'
        return self.error


async def awaited(run): return await run


def is_gone(name, children):
    "Nothing of a run is left, and no process of it"
    from laminar_sdk.shells import names
    until(lambda: names(f'{name}/') == [])
    until(lambda: not any(Path(f"/proc/{c['pid']}").exists() for c in children.values()))


def test_its_directory_is_damaged_while_it_is_dead(cluster, model, tmp_path, figures):
    from laminar_sdk.run import Run
    run = start(cluster, model, tmp_path, 'vanished', steps=100_000, engine=dict(step_s=.02))
    s = running(run, 3)
    config, there = Path(s['run_dir'])/'config.json', Run.attach(cluster, 'vanished')
    whole, view = config.read_bytes(), run.dashboard()
    until(lambda: view.series.steps)
    who = Waiting(lambda: run.wait(show=False)), Waiting(lambda: asyncio.run(awaited(run))), Waiting(lambda: there.wait(show=False)) # the last one does not know its directory
    time.sleep(1)
    config.write_bytes(whole[:100])
    os.kill(s['pid'], signal.SIGKILL)
    t = time.monotonic()
    for w in who:
        e = w.hears()
        assert isinstance(e, RunError) and 'config.json is damaged' in e.message and 'had not ended' in e.message and 'Run.resume(' in e.remedy, repr(e)
    figures['heard_after_s'] = round(time.monotonic() - t, 1)
    view.thread.join(PATIENCE_S)
    assert view.frozen and 'config.json is damaged' in view.foot.value
    is_gone('vanished', s['children'])
    with pytest.raises(MissingError, match='config.json is damaged'): run.status()
    with pytest.raises(MissingError): Run.attach(cluster, 'vanished')
    with pytest.raises(IntegrityError, match='config.json is damaged'): Run.resume(s['run_dir'], cluster)

    config.write_bytes(whole)
    back = Run.resume(s['run_dir'], cluster)
    s = running(back, s['step'] + 1)
    killed_for_good(back, s)
    back = Run.resume(s['run_dir'], cluster) # what was left would work for the dead run: it goes first
    new = running(back, s['step'] + 1)
    assert not {c['pid'] for c in new['children'].values()} & {c['pid'] for c in s['children'].values()}
    back.stop()
    assert Run.load(s['run_dir']).audit() == []


def killed_for_good(run, s):
    "By Ray's own command, which is no crash: it does not come back, and its children have heard nothing"
    import ray
    from laminar_sdk.shells import actor_name, find, names
    waits = Waiting(lambda: run.wait(show=False))
    time.sleep(1)
    ray.kill(find(actor_name(run.name, 'coordinator')), no_restart=True)
    e = waits.hears()
    assert isinstance(e, RunError) and 'ray.kill' in e.message and 'Run.resume(' in e.remedy, repr(e)
    assert len(names(f'{run.name}/')) >= 3


def test_its_ledger_is_damaged_and_the_log_says_where(cluster, model, tmp_path):
    from laminar_sdk.run import Run
    run = start(cluster, model, tmp_path, 'torn', steps=100_000, engine=dict(step_s=.02), replicas=1)
    s = running(run, 2)
    folder, waits = Path(s['run_dir']), Waiting(lambda: run.wait(show=False))
    time.sleep(1)
    os.kill(s['pid'], signal.SIGSTOP) # it must not write any more
    for f in folder.glob('ledger.sqlite*'): f.write_bytes(b'no database' * 1000)
    os.kill(s['pid'], signal.SIGKILL)
    e = waits.hears()
    assert isinstance(e, RunError) and 'Run.resume(' in e.remedy, repr(e)
    is_gone('torn', s['children'])
    log = '\n'.join(Run.load(folder).logs('coordinator'))
    assert 'Traceback' in log and log.strip().splitlines()[-1].split(':')[0].split('.')[-1] in str(e), (log, str(e))


def test_a_start_that_cannot_be_says_why_in_plain_words(cluster, model, tmp_path):
    from laminar_sdk.shells import names
    (tmp_path/'taken').write_text('a file')
    with pytest.raises(RunError, match='taken is a file') as e: start(cluster, model, tmp_path, 'taken')
    assert 'name a folder' in e.value.remedy and names('taken/') == []


def test_a_secret_does_not_get_as_far_as_the_config(cluster, model, tmp_path):
    from laminar_sdk.core.errors import ConfigError
    with pytest.raises(ConfigError, match='WANDB_API_KEY') as e: start(cluster, model, tmp_path, 'secret', trackers={'wandb': dict(mode='offline', api_key='k-123456')})
    assert 'k-123456' not in str(e.value) and not (tmp_path/'secret').exists()
