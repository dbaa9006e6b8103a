"Ranks that are real processes: they learn what one would, decide alike, and none waits for ever"
import multiprocessing as mp, os, queue, signal, time

import numpy as np
import pytest
import torch

from laminar_sdk.core.config import GRPO, GSPO, PPO, LoRA
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.checkpoint import Snapshot, begin, check, commit, load
from laminar_sdk.training.equal import LIMITS, Watched, ranks_equal, sample
from laminar_sdk.training.policy import random_policy
from laminar_sdk.training.ranks import Alone, Ranks, listen

pytestmark = pytest.mark.timeout(300)


def worker(ranks=Alone(), micro_tokens=64, seed=3, **algorithm):
    return ActorWorker(random_policy(seed=3), algorithm=GRPO(**{'lr': 1e-3} | algorithm), device='cpu', micro_tokens=micro_tokens, ranks=ranks, seed=seed)


def masters(w): return [m.clone() for m in w.masters.masters]
def numbers(d): return {k: v for k, v in d.items() if not k.endswith(('_s', 'seconds')) and k not in ('micro_batches', 'tokens_computed', 'padding_waste', 'seconds')}


# ---------------------------------------------------------------- what a rank does

def several_updates(ranks, folder):
    "Minibatches, epochs, the actor's own old log-probs, gradients that are clipped"
    w = worker(ranks, minibatches=2, epochs=2, old='actor', grad_clip=.05)
    first = masters(w)
    said = [numbers(w.step(sample(seed=s))) for s in range(2)]
    return dict(moved=[m - f for m, f in zip(masters(w), first)], said=said)


def not_finite(ranks, folder):
    "One token's log-prob is NaN, in one row, which only one rank has"
    w, bad = worker(ranks), sample(seed=8)
    row = next(t for t in bad if t.loss_mask.all() and len({x.reward for x in bad if x.group_id == t.group_id}) > 1)
    row.logprobs[0] = np.nan
    before, said = masters(w), w.step(bad)
    same = all(torch.equal(a, b) for a, b in zip(before, masters(w)))
    return dict(skipped=said['skipped'], updates=w.updates, same=same, after=w.step(sample(seed=9))['skipped'])


def few_rows(ranks, folder):
    "One group with a signal, of two rows: of three ranks, one has nothing to do"
    w, made = worker(ranks), sample(groups=3, size=2, seed=1)
    for t in made: t.reward = float(t.id == 0)
    first, said = masters(w), numbers(w.step(made))
    for t in made: t.reward = 1. # and now nobody has
    none = w.step(made)
    return dict(moved=[m - f for m, f in zip(masters(w), first)], said=[said], none=none['updates'])


def begun(ranks, folder):
    "They begin with groups as these come, and memory ends once on one of them; one alone has its batch at once"
    w, batch = worker(ranks), sample()
    if ranks.rank == 2 and not ranks.sharded:
        inner, failed = w._backward, []
        def full(x, *args):
            out = inner(x, *args)
            if failed or len(x.input_ids) == 1: return out
            failed.append(x)
            raise torch.OutOfMemoryError('CUDA out of memory')
        w._backward = full
    for share in (batch[8:12], batch[:8]) if ranks.size > 1 else (): w.begin(share, 1)
    lost = w.begun is not None and w.begun.lost
    first, said = masters(w), numbers(w.step(batch, 1))
    early = said.pop('begun_groups', 0)
    said.pop('splits', 0)
    return dict(moved=[m - f for m, f in zip(masters(w), first)], said=[said], early=early, lost=lost)


def saved(ranks, folder, make=worker):
    "All write their pieces"
    w = make(ranks)
    for s in range(2): w.step(sample(seed=s))
    snapshot = Snapshot()
    t = time.process_time()
    snapshot.take(w)
    took = time.process_time() - t
    if ranks.rank == 0: begin(folder, 2)
    ranks.total(0) # all wait until the folder is there
    snapshot.write(folder/'step-000002.tmp')
    ranks.total(0)
    if ranks.rank == 0: commit(folder/'step-000002.tmp', snapshot, 2, dict(cursor=7))
    ranks.total(0)
    back = make(ranks, seed=9)
    load(folder/'step-000002', back)
    again = all(torch.equal(a, b) for a, b in zip(masters(w), masters(back)))
    next_ = [x.step(sample(seed=5)) for x in (w, back)]
    return dict(again=again and next_[0]['loss'] == next_[1]['loss'], moved=ours(w), took=took)


def resumed(ranks, folder, make=worker):
    "From a checkpoint that others wrote"
    w = make(ranks, seed=9)
    step = load(folder/'step-000002', w)['step']
    w.step(sample(seed=5))
    return dict(step=step, moved=ours(w))


KINDS = dict(critic=dict(algorithm=PPO(group_size=4, kl=.1, kl_as='reward', reference='initial', lr=1e-3, critic_lr=1e-3, grad_clip=1e9)),
             lora=dict(algorithm=GRPO(group_size=4, kl=.1, reference='initial', lr=1e-3, grad_clip=1e9), lora=LoRA(rank=3)),
             both=dict(algorithm=PPO(group_size=4, lr=1e-3, critic_lr=1e-3, grad_clip=1e9), lora=LoRA(rank=4)),
             packed=dict(algorithm=GSPO(group_size=4, entropy=.01, lr=1e-3, grad_clip=1e9, padding_free=True, activation_checkpointing=True)),
             packed_critic=dict(algorithm=PPO(group_size=4, lr=1e-3, critic_lr=1e-3, grad_clip=1e9, padding_free=True)))


def of_kind(kind, ranks, seed=3):
    "A worker whose critic has an opinion, and whose additions are something"
    w, noise = Watched(random_policy(seed=3), device='cpu', micro_tokens=64 if ranks.size > 1 else 16_384, ranks=ranks, seed=3, **KINDS[kind]), torch.Generator().manual_seed(7)
    if w.critic:
        with torch.no_grad(): w.critic.named['head.weight'].copy_(ranks.rows(.3*torch.randn(w.critic.masters.kept['head.weight'], generator=noise)))
        w.critic.masters.round_()
        w.critic._move = lambda: (setattr(w, 'seen_critic', [m.grad.clone() for m in w.critic.named.values()]), type(w.critic)._move(w.critic))
    for n, m in zip(w.masters.names, w.masters.masters):
        if n.endswith('lora_B'): m.copy_(ranks.rows(torch.randn(w.masters.kept[n], generator=noise)*.05))
    w.masters.round_()
    return w


def ours(w, grad=False):
    "What each rank has of the masters; of what all have, its rows"
    rows = [w.ranks.rows(m) if n in w.masters.everywhere else m for n, m in zip(w.masters.names, w.seen if grad else w.masters.masters)]
    critic = [] if not w.critic else w.seen_critic if grad else w.critic.named.values()
    return [m.clone() for m in [*rows, *critic]]


def parity(kind, ranks):
    "Gradients of an update, weights after five steps of SGD, updates of five steps of AdamW; of policy and critic together"
    w, sgd, adamw = (of_kind(kind, ranks) for _ in range(3))
    sgd.optimizer = torch.optim.SGD(sgd.masters.masters, lr=.02)
    if sgd.critic: sgd.critic.optimizer = torch.optim.SGD(sgd.critic.named.values(), lr=.02)
    first, said = ours(adamw), numbers(w.step(sample()))
    for seed in range(5): sgd.step(sample(seed=seed)), adamw.step(sample(seed=seed))
    return dict(gradients=ours(w, grad=True), sgd=ours(sgd), adamw=[m - f for m, f in zip(ours(adamw), first)], said=said)


def parity_critic(ranks, folder): return parity('critic', ranks)
def parity_lora(ranks, folder): return parity('lora', ranks)
def parity_both(ranks, folder): return parity('both', ranks)
def parity_packed(ranks, folder): return parity('packed', ranks)
def parity_packed_critic(ranks, folder): return parity('packed_critic', ranks)
PARITY = parity_critic, parity_lora, parity_both, parity_packed, parity_packed_critic

def published(ranks, folder):
    "The part of an adapter version that each rank sends, and its rows of the model that it computes with"
    w = of_kind('lora', ranks)
    w.step(sample())
    sent, part = w.masters.sent(), ranks.part(w.layout())
    return dict(moved=[x.clone() for x in (sent if part is None else ranks.own(sent, part)).values()], names=list(sent), made=[x.float().numpy() for x in w.masters.image.values()],
                image=list(w.masters.image), nbytes=w.layout().nbytes)


def both(ranks, seed=3): return of_kind('both', ranks, seed)
def saved_both(ranks, folder): return saved(ranks, folder, both)
def resumed_both(ranks, folder): return resumed(ranks, folder, both)


def dies(ranks, folder):
    "Rank 1 is killed within a step"
    w, t = worker(ranks), None
    w.step(sample())
    if ranks.rank == 1:
        inner = w._backward
        w._backward = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    t = time.monotonic()
    try: w.step(sample(seed=1))
    except Exception as e: return dict(error=f'{type(e).__name__}: {e}', seconds=time.monotonic() - t)


def hangs(ranks, folder):
    "Rank 1 does not come to the sum"
    w = worker(ranks)
    w.step(sample())
    if ranks.rank == 1: time.sleep(60)
    t = time.monotonic()
    try: w.step(sample(seed=1))
    except Exception as e: return dict(error=f'{type(e).__name__}: {e}', seconds=time.monotonic() - t)


# ---------------------------------------------------------------- raising them

def moved(what, how):
    "Tensors as arrays, or back: a tensor in a queue is a file of its process, and gone with it"
    return {k: [how(x) for x in v] if k in ('moved', *LIMITS) else v for k, v in what.items()} if isinstance(what, dict) else what


def rank_main(rank, size, parallel, jobs, folder, where, said, timeout_s):
    torch.set_num_threads(1)
    place = listen('127.0.0.1') if rank == 0 else None
    if rank == 0:
        for _ in range(1, size): where.put(place.getsockname()[:2])
    ranks = Ranks(rank, size, parallel).meet('127.0.0.1', place.getsockname()[:2] if rank == 0 else where.get(timeout=60), place, timeout_s=timeout_s)
    for job in jobs: said.put((rank, job.__name__, moved(job(ranks, folder), torch.Tensor.numpy)))


def raised(size, parallel, jobs, folder, expect=None, timeout_s=60.):
    "What each rank said of each job: by job, then by rank"
    context = mp.get_context('spawn')
    where, said, out = context.Queue(), context.Queue(), {job.__name__: {} for job in jobs}
    started = [context.Process(target=rank_main, args=(r, size, parallel, jobs, folder, where, said, timeout_s), daemon=True) for r in range(size)]
    for p in started: p.start()
    try:
        left = expect or size*len(jobs)
        while left:
            try: rank, job, what = said.get(timeout=1)
            except queue.Empty:
                assert expect or not any(p.exitcode for p in started), [p.exitcode for p in started]
                continue
            out[job][rank] = moved(what, torch.from_numpy)
            left -= 1
        return out
    finally:
        for p in started: p.kill()


def whole(ranks, key, parallel):
    return [x for x in ranks[0][key]] if parallel == 'ddp' else [torch.cat(rows) for rows in zip(*(ranks[r][key] for r in sorted(ranks)))]


def apart(a, b): return float(torch.cat([(x - y).flatten() for x, y in zip(a, b)]).norm()/torch.cat([x.flatten() for x in a]).norm())


# ---------------------------------------------------------------- the tests

@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_three_ranks_do_what_one_does(tmp_path, parallel, figures):
    out = raised(3, parallel, [several_updates, not_finite, few_rows, begun, saved], tmp_path)
    for job in (several_updates, few_rows, begun):
        alone, ranks = job(Alone(), tmp_path), out[job.__name__]
        figures[job.__name__] = apart(alone['moved'], whole(ranks, 'moved', parallel))
        assert figures[job.__name__] < 1e-3
        for r in ranks.values():
            for a, b in zip(alone['said'], r['said']):
                assert a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=2e-3, abs=1e-6) for k in a), {k: (a[k], b[k]) for k in a if a[k] != b[k]}
    assert all(r['none'] == 0 for r in out['few_rows'].values())
    assert {(r, x['early'], x['lost']) for r, x in out['begun'].items()} == {(0, 3, False), (1, 3, False), (2, 3, parallel == 'ddp')}
    assert all((r['skipped'], r['updates'], r['same'], r['after']) == (1, 0, True, 0) for r in out['not_finite'].values())
    assert all(r['again'] for r in out['saved'].values())
    manifest = check(tmp_path/'step-000002')
    pieces = sorted(p.name for p in (tmp_path/'step-000002').glob('masters*'))
    assert pieces == (['masters.safetensors'] if parallel == 'ddp' else [f'masters-{r}-of-3.safetensors' for r in range(3)]) and manifest['extra'] == dict(cursor=7)
    alone = resumed(Alone(), tmp_path)
    figures['resumed_alone'] = apart(alone['moved'], whole(out['saved'], 'moved', parallel))
    assert alone['step'] == 2 and figures['resumed_alone'] < 1e-6
    two = raised(2, 'fsdp' if parallel == 'ddp' else 'ddp', [resumed], tmp_path)['resumed'] # another number, and the other way to share
    assert apart(alone['moved'], whole(two, 'moved', 'fsdp' if parallel == 'ddp' else 'ddp')) < 1e-6


def version_of_parts(ranks, parallel):
    "The parts make an adapter version, and base and version make what the ranks compute with"
    from laminar_sdk.weights.adapter import merge, unpack
    first, base = ranks[0], dict(random_policy(seed=3).model.named_parameters())
    read = unpack(dict(zip(first['names'], (torch.cat(rows) for rows in zip(*(ranks[r]['moved'] for r in sorted(ranks)))))))
    assert any(read.sums.values()) == (parallel == 'ddp') # of rows there is no sum of the whole
    for i, n in enumerate(first['image']):
        rows = [torch.from_numpy(ranks[r]['made'][i]) for r in sorted(ranks)]
        if n in read.layers: assert torch.equal(merge(base[n].detach(), *read.layers[n], read.about.scale, torch.empty(base[n].shape, dtype=torch.bfloat16)).float(), rows[0] if parallel == 'ddp' else torch.cat(rows))


@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_critic_additions_and_rows_end_to_end_learn_as_one_does(tmp_path, parallel, figures):
    out = raised(2, parallel, [*PARITY, published, saved_both], tmp_path)
    for job in PARITY:
        one, ranks = job(Alone(), tmp_path), out[job.__name__]
        apart_by = {k: apart(one[k], whole(ranks, k, parallel)) for k in LIMITS}
        figures[job.__name__] = apart_by
        assert all(apart_by[k] <= LIMITS[k] for k in LIMITS), (job.__name__, apart_by)
        for r in ranks.values(): assert all(one['said'][k] == pytest.approx(r['said'][k], rel=1e-3, abs=1e-6) for k in one['said']), (job.__name__, one['said'], r['said'])
        if parallel == 'ddp': assert all(torch.equal(x, y) for k in LIMITS for x, y in zip(ranks[0][k], ranks[1][k]))
    version_of_parts(out['published'], parallel)
    assert all(r['again'] for r in out['saved_both'].values())
    for kind in ('masters', 'critic_optimizer'): assert len([*(tmp_path/'step-000002').glob(f'{kind}*')]) == (1 if parallel == 'ddp' else 2)
    alone = resumed_both(Alone(), tmp_path)
    figures['resumed_alone'] = apart(alone['moved'], whole(out['saved_both'], 'moved', parallel))
    assert alone['step'] == 2 and figures['resumed_alone'] < 1e-6
    other = 'fsdp' if parallel == 'ddp' else 'ddp'
    three = raised(3, other, [resumed_both], tmp_path)['resumed_both'] # another number, and the other way to share
    figures['resumed_by_three'] = apart(alone['moved'], whole(three, 'moved', other))
    assert figures['resumed_by_three'] < 1e-6


@pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
def test_a_rank_that_dies_is_noticed_at_once(tmp_path, parallel, figures):
    out = raised(2, parallel, [dies], tmp_path, expect=1)['dies']
    figures['seconds'] = out[0]['seconds']
    assert list(out) == [0] and out[0]['seconds'] < 10, out


def test_a_rank_that_hangs_ends_the_step_after_the_time_limit(tmp_path, figures):
    out = raised(2, 'ddp', [hangs], tmp_path, expect=1, timeout_s=4.)['hangs']
    figures['seconds'] = out[0]['seconds']
    assert list(out) == [0] and 3 < out[0]['seconds'] < 20 and 'imed out' in out[0]['error'], out


@pytest.mark.long
def test_four_ranks_equal_one():
    report = ranks_equal(4)
    assert report['equal'] and all(report[way][k] <= LIMITS[k] for way in ('ddp', 'fsdp') for k in LIMITS), report
