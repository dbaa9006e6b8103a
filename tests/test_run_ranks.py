"""A run whose actor has two ranks: real Ray, real relays, real sums between two processes, each on its own (logical) host; only tokens are random"""
import os, signal
import pytest

from laminar_sdk.core import events as ev
from laminar_sdk.core.config import GRPO, LoRA, Sampling
from laminar_sdk.core.errors import ConfigError
from test_run import finish, length, model, notices, running, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
P, G = 2, 4


def start(cluster, model, folder, name, ranks=2, parallel='ddp', steps=4, lora=None, **more):
    from laminar_sdk.relay_tier import RelayTier
    from laminar_sdk.rollout_pool import RolloutPool
    from laminar_sdk.trainer import Trainer
    relays = RelayTier(cluster, keep=4)
    pool = RolloutPool(cluster, model, relays, replicas=2, max_model_len=64, max_running=8, engine='emulated', step_s=.005)
    trainer = Trainer(cluster, model, relays, GRPO(group_size=G, lr=1e-3), ranks=ranks, parallel=parallel, lora=lora)
    rows = [dict(prompt=f'{a}+{b}=', answer=str(a + b)) for a in range(5) for b in range(5)]
    return trainer.fit(pool, rows, length, name=name, steps=steps, prompts_per_step=P, sampling=Sampling(max_tokens=40), checkpoint=2, run_dir=str(folder/name), **more)


def steps_of(seen): return [r.event for r in seen if isinstance(r.event, ev.StepDone)]


def newest(run_dir):
    from laminar_sdk.training.checkpoint import check, newest_valid
    found, notes = newest_valid(run_dir/'checkpoints')
    return found, check(found), notes


def groups_left(run):
    import ray
    from laminar_sdk.gang import group_name
    return [g for g in ray.util.placement_group_table().values() if g['name'] == group_name(run) and g['state'] != 'REMOVED']


def images(folder):
    "Checksum and bytes of every version that was whole somewhere, from the flight recorder"
    from laminar_sdk.data.recorder import read
    return {e.version: (e.checksum, e.nbytes) for e in (r.event for r in read(folder/'events'/'manager')) if isinstance(e, ev.VersionReady)}


def left_behind(folder, seen, parallel):
    "Together the ranks have written one image of each version, not two, and a checkpoint that is whole; its step"
    steps, nbytes = steps_of(seen), {n for _, n in images(folder).values()}
    assert len(nbytes) == 1 and all(abs(e.metrics['publish_bytes']/max(nbytes) - 1) < .25 for e in steps)
    found, manifest, bad = newest(folder)
    assert (manifest['pieces'], bad) == (2 if parallel == 'fsdp' else 1, []) and not groups_left(folder.name)
    return found.name


@pytest.mark.long # the quick ones: a run whose relay dies, and one that is stopped
@pytest.mark.parametrize('parallel, lora', [('ddp', None), ('fsdp', None), ('ddp', LoRA(rank=4)), ('fsdp', LoRA(rank=4))])
def test_to_the_end(cluster, model, tmp_path, parallel, lora, figures):
    run = start(cluster, model, tmp_path, f'two-{parallel}', parallel=parallel, lora=lora)
    until(lambda: groups_left(run.name))
    s, counts, seen = finish(run)
    steps = steps_of(seen)
    assert [e.step for e in steps] == [1, 2, 3, 4] and counts['train']['trained'] == 4*P*G
    figures.update(stall_ms=[round(1e3*e.metrics['publish_stall_s'], 2) for e in steps], step_s=[round(e.metrics['seconds'], 3) for e in steps],
                   checkpoint_stall_ms=[round(1e3*e.metrics['checkpoint_stall_s'], 2) for e in steps if 'checkpoint_stall_s' in e.metrics])
    assert left_behind(tmp_path/run.name, seen, parallel) == 'step-000004'


@pytest.mark.long
@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_both_begin_with_groups_that_are_complete(cluster, model, tmp_path, parallel):
    run = start(cluster, model, tmp_path, f'stream-{parallel}', parallel=parallel, schedule='stream', steps=8)
    s, counts, seen = finish(run)
    begun = [e.metrics.get('begun_groups', 0) for e in steps_of(seen)]
    assert counts['train']['trained'] == 8*P*G and len(begun) == 8 and 1 <= sum(begun) and max(begun) <= P, begun


@pytest.mark.long
def test_two_ranks_write_what_one_would(cluster, model, tmp_path):
    "All begin with the same weights: the first version of each run is bit-equal, whether it came from one relay or from two"
    sums = {}
    for ranks, parallel in ((1, 'ddp'), (2, 'ddp'), (2, 'fsdp')):
        run = start(cluster, model, tmp_path, f'same-{ranks}-{parallel}', ranks, parallel, steps=2)
        finish(run)
        seen = images(tmp_path/run.name)
        sums[ranks, parallel] = seen[min(seen)]
        assert len(seen) > 1 and len({checksum for checksum, _ in seen.values()}) > 1
    assert len(set(sums.values())) == 1, sums


@pytest.mark.parametrize('victim', [0, 1])
def test_a_rank_is_killed(cluster, model, tmp_path, victim):
    run = start(cluster, model, tmp_path, f'kill-{victim}', steps=14, parallel=['ddp', 'fsdp'][victim])
    children = running(run, 3)['children']
    os.kill(children[f'actor/{victim}']['pid'], signal.SIGKILL)
    s, counts, seen = finish(run)
    now = s['children']
    assert all(now[f'actor/{r}']['pid'] != children[f'actor/{r}']['pid'] for r in (0, 1)) # both are new
    assert all(now[f'rollout/{i}']['pid'] == children[f'rollout/{i}']['pid'] for i in (0, 1)) # nobody else is
    assert any('all its ranks go on' in n for n in notices(seen)) and any('life number 2, 2 ranks' in n for n in notices(seen))
    assert max(e.step for e in steps_of(seen)) == 14 and counts['train']['trained'] == 14*P*G


def test_to_the_end_although_the_relay_of_the_second_rank_dies(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'relay', steps=14)
    until(lambda: groups_left('relay'))
    children = running(run, 2)['children']
    os.kill(children['relay/1']['pid'], signal.SIGKILL)
    s, counts, seen = finish(run)
    assert s['children']['relay/1']['restarts'] == 1 and s['children']['actor/0']['restarts'] == s['children']['actor/1']['restarts'] == 0
    assert counts['train']['trained'] == 14*P*G and [e.step for e in steps_of(seen)] == [*range(1, 15)]
    assert left_behind(tmp_path/'relay', seen, 'ddp') == 'step-000014'


def test_stopped_and_gone_on_with_another_number_of_ranks(cluster, model, tmp_path):
    run = start(cluster, model, tmp_path, 'on', steps=14, parallel='fsdp')
    until(lambda: (tmp_path/'on'/'checkpoints'/'step-000002').exists())
    run.stop()
    left_behind(tmp_path/'on', run.events(max_items=100_000), 'fsdp')
    again = start(cluster, model, tmp_path, 'on', ranks=1, steps=14)
    s, counts, seen = finish(again)
    assert s['step'] == 14 and counts['train']['trained'] == 14*P*G and newest(tmp_path/'on')[1]['pieces'] == 1
    assert any('the actor is up at step' in n and 'up at step 0' not in n for n in notices(seen))


def test_wrong_ranks_are_errors_in_the_cell(cluster, model, tmp_path):
    with pytest.raises(ConfigError, match='at least 1'): start(cluster, model, tmp_path, 'none', ranks=0)
    with pytest.raises(ConfigError, match='fsdp'): start(cluster, model, tmp_path, 'none', parallel='tensor')
