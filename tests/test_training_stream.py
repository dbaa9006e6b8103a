"A step that is begun before its batch is complete comes to what the whole step comes to, whatever arrives when, and whatever was foreseen wrongly"
import asyncio, dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from laminar_sdk.coordinator import Coordinator
from laminar_sdk.core import events as ev
from laminar_sdk.core.config import CISPO, DAPO, GRPO, GSPO, RLOO, Algorithm, DrGRPO, LoRA, RunConfig, whole_step
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.doing import ToOthers
from laminar_sdk.scheduling import commands as cm
from laminar_sdk.scheduling.batches import Batches
from laminar_sdk.scheduling.evaluation import Evaluations
from laminar_sdk.scheduling.fleet import Fleet
from laminar_sdk.scheduling.ledger import Ledger
from laminar_sdk.training.actor import ActorWorker
from laminar_sdk.training.policy import random_policy
from test_training_actor import one_thread, reading, trajectories # noqa: F401 (fixtures)

GROUP = 4


class Spy(ActorWorker):
    "Keeps the gradients of its last update"
    def __init__(self, algorithm=GRPO(), **options):
        super().__init__(random_policy(seed=3), algorithm=algorithm.model_copy(update=dict(lr=1e-3, grad_clip=1e9)), device='cpu', max_tokens=40, **options)
        self.version = 0

    def _optimize(self):
        self.seen = torch.cat([m.grad.flatten().clone() for m in self.masters.masters])
        super()._optimize()


def made(groups=6, seed=0, **options):
    "A step's groups; some answers were cut off, some of an older version, some with tokens of the environment"
    rng, rows = np.random.default_rng(seed), trajectories(groups, GROUP, seed, **options)
    for t in rows:
        t.finish_reason, t.versions = ('length', 'stop', 'stop')[int(rng.integers(3))], [(0, int(rng.integers(-2, 1)))]
        t.logprobs = np.where(t.loss_mask, np.log(1/19) + rng.normal(0, .2, len(t)), 0.).astype(np.float32)
    return rows


def same(a: dict, b: dict, rel=2e-5, least=1e-6):
    "All figures of a step but how long it took and how it was cut"
    cut = {'seconds', 'tokens_per_s', 'micro_batches', 'tokens_computed', 'padding_waste', 'begun_groups', 'begun_in_vain'}
    assert a.keys() - cut == b.keys() - cut
    for k in a.keys() - cut: assert a[k] == pytest.approx(b[k], rel=rel, abs=least), k


def equal(whole, other): assert (whole.seen - other.seen).norm() <= 1e-5*whole.seen.norm()


ALGORITHMS = [GRPO(), GRPO(aggregation='sequence_mean_of_means'), GRPO(old='actor', corrections=['token_tis', 'staleness']), GRPO(old='interpolated'),
              DrGRPO(), RLOO(), GSPO(), CISPO(), DAPO(dynamic_sampling=False, overlong=.5, overlong_filter=True), GRPO(kl=.1, reference='initial', entropy=.01), GRPO(loss='decoupled', old='actor')]


@pytest.mark.parametrize('algorithm', ALGORITHMS, ids=lambda a: '-'.join(str(v) for k, v in a.__repr_args__() if k not in ('lr', 'group_size')) or 'grpo')
def test_any_order_of_arrival_any_shares(algorithm, reading):
    assert not whole_step(algorithm)
    batch, whole, rng = made(seed=7), Spy(algorithm), np.random.default_rng(1)
    f = whole.step(batch, 1)
    for n in (4, 6): # also when all of them are begun
        w = Spy(algorithm)
        for share in np.split(rng.permutation(6)[:n], [1, 3]): w.begin([t for g in share for t in batch if t.group_id == g], 1)
        figures = w.step(batch, 1)
        assert figures['begun_groups'] == n and w.begun is None and w.updates == 1
        equal(whole, w)
        same(f, figures)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_steps(data):
    "Several steps in a row: shares in any order, again, of groups that are not in the batch, that have other answers now, of another step; one update each"
    whole, w = Spy(), Spy()
    for number in range(1, 4):
        batch, others = made(data.draw(st.integers(1, 5)), seed=data.draw(st.integers(0, 99))), made(1, seed=100)
        for t in others: t.group_id, t.id = 77, t.id + 1000
        now = data.draw(st.sampled_from([lambda t: dict(reward=1 - t.reward), lambda t: dict(response_ids=t.response_ids % 18 + 1)]))
        odd = dict(stranger=others, changed=[dataclasses.replace(t, **now(t)) for t in batch[:GROUP]], torn=batch[:GROUP - 1], nothing=[])
        for _ in range(data.draw(st.integers(0, 5))):
            groups = data.draw(st.lists(st.sampled_from(sorted({t.group_id for t in batch})), unique=True))
            share = odd.get(data.draw(st.sampled_from([*odd, *['usual']*6])), [t for g in groups for t in batch if t.group_id == g])
            w.begin(share, number + data.draw(st.sampled_from([0]*9 + [1])))
        a, b = whole.step(batch, number), w.step(batch, number)
        same(a, b) if number == 1 else same(a, b, 1e-2, 2e-2) # published weights are rounded: later steps may begin at slightly other ones
        if a['updates']: assert (whole.seen - w.seen).norm() <= (1e-5 if number == 1 else 1e-2)*whole.seen.norm()
        assert whole.updates == w.updates and w.begun is None and all(m.grad is None for m in w.masters.masters)


def test_nothing_moves_before_the_step_and_a_life_that_ends_leaves_nothing():
    w, batch = Spy(), made()
    before = [m.clone() for m in w.masters.masters]
    w.begin(batch[:12], 1)
    assert all(torch.equal(a, b) for a, b in zip(before, w.masters.masters)) and w.updates == 0 and not w.optimizer.state
    f, (fresh, again) = w.step(batch, 1), (Spy(), Spy())
    same(fresh.step(batch, 1), f)
    same(again.step(batch, 1), f) # the next life, which never heard of the groups that were begun


def test_a_publish_in_between_makes_it_begin_anew():
    "Freshness is counted from the newest version: it has to be one for the whole step"
    w, whole, batch = Spy(), Spy(), made()
    w.begin(batch[:12], 1)
    w.version = whole.version = 1
    w.begin(batch[12:16], 1)
    f = w.step(batch, 1)
    assert f['begun_groups'] == 1
    same(whole.step(batch, 1), f)
    equal(whole, w)


@pytest.mark.parametrize('early, late', [(2, 0), (0, 1), (2, 1)]) # the micro-batch at which memory ends, before the step and in it
def test_memory_that_does_not_suffice_loses_no_group(early, late, reading):
    "The early gradients are gone with the others, and are computed again"
    algorithm, batch, calls = GRPO(kl=.1, reference='initial'), made(), []
    whole, w = Spy(algorithm), Spy(algorithm)
    inner, at, budget = w._backward, early, w.budget

    def backward(*args):
        out = inner(*args)
        if args[0].input_ids.shape[0] > 1: calls.append(1) # a row that does not fit alone is another matter
        if at and len(calls) == at:
            calls.append(1)
            raise torch.OutOfMemoryError('CUDA out of memory')
        return out
    w._backward = backward
    for g in range(3): w.begin(batch[g*GROUP:(g + 1)*GROUP], 1)
    assert w.begun.lost == bool(early) and len(w.begun.seen) == 3
    at, w.budget = late, budget
    calls.clear()
    f, b = whole.step(batch, 1), w.step(batch, 1)
    assert b.pop('splits') == bool(early) + bool(late) and b['begun_groups'] == 3
    equal(whole, w)
    same(f, b)
    assert 'splits' not in w.step(batch, 2)


def test_a_loss_that_is_not_finite_skips_the_step_also_if_it_came_early():
    w, batch = Spy(), made()
    bad = next(t for t in batch[:12] if t.loss_mask.all() and len({x.reward for x in batch if x.group_id == t.group_id}) > 1)
    bad.logprobs = bad.logprobs.copy()
    bad.logprobs[0] = np.nan
    before = [m.clone() for m in w.masters.masters]
    w.begin(batch[:12], 1)
    assert w.step(batch, 1)['skipped'] == 1 and all(torch.equal(a, b) for a, b in zip(before, w.masters.masters))
    assert w.step(made(seed=2), 2)['updates'] == 1


def test_additions_of_low_rank():
    lora, batch = LoRA(rank=4), made()
    whole, w = Spy(lora=lora), Spy(lora=lora)
    f = whole.step(batch, 1)
    for g in (4, 0): w.begin(batch[g*GROUP:(g + 1)*GROUP], 1)
    same(f, w.step(batch, 1))
    equal(whole, w)


@pytest.mark.parametrize('algorithm', [GRPO(minibatches=2), GRPO(epochs=2), GRPO(whiten=True), Algorithm(advantage='reinforce_pp'),
                                       Algorithm(advantage='reinforce_pp_baseline'), Algorithm(advantage='gae', critic='initial'), GRPO(kl=.1, kl_as='reward', reference='initial')])
def test_what_needs_the_whole_step_is_refused(algorithm):
    assert whole_step(algorithm)
    w = Spy()
    w.algorithm = algorithm
    with pytest.raises(ConfigError, match='cannot be begun'): w.begin(made(1), 1)
    w.begin([], 1)
    assert w.begun is None


# ---------------------------------------------------------------- who may begin with what

class Desk(ToOthers):
    "The coordinator's side of the actor, around a real ledger"
    next_batch = Coordinator.next_batch

    def __init__(self, n):
        config = RunConfig(name='r', model='m', steps=9, prompts_per_step=n, algorithm=GRPO(group_size=2), schedule='stream')
        self.ledger, self.manager, self.table = Ledger(), self, self
        self.core = Batches(config, self.ledger, Evaluations(self.ledger, Fleet(), 0, 0, 2))
        self.core.joined(incarnation=1, step=0)
        self.ledger.publish(self.core.issue_version(0, 1), 0, 1)
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.batches, self.shown, self.given, self.said = {}, (None, []), {}, []
        self.ready.set()

    def orders(self): return {}
    def batch_figures(self, step): return {}
    def batch(self, step): return None

    async def feed(self, *events):
        for e in events: self.core.ask(e) if isinstance(e, ev.BatchAsked) else self.core.trained(e)
        self.decide()
        await asyncio.sleep(0)

    def decide(self):
        for c in self.core.give():
            self.said.append(c)
            getattr(self, f'_do_{type(c).__name__}')(c)

    def complete(self):
        g = self.ledger.admit(prompt=0, n=2)
        for t in self.ledger.members[g]: self.ledger.place(t, 0, self.ledger.newest); self.ledger.finish(t, 'stop', 10)
        self.ledger.close(g)
        for t in self.ledger.members[g]: self.ledger.score(t, 1., 10)
        self.ledger.complete(g)
        self.decide()


@pytest.mark.parametrize('seed', range(40))
def test_every_step_gets_its_batch_and_hears_of_its_groups_before_once(seed):
    "Groups are complete at any moment: while the actor waits, while it is busy with those before, between question and answer"
    rng, n, steps = np.random.default_rng(seed), 1 + seed % 5, 4

    async def turns(most):
        for _ in range(int(rng.integers(most))): await asyncio.sleep(0)

    async def produce(desk):
        for _ in range(n*steps):
            await turns(12)
            desk.complete()

    async def act(desk):
        begun, early = [], 0
        for step in range(1, steps + 1):
            while (answer := await desk.next_batch(1, step)).get('early'):
                assert answer['trajectories'], 'asked to begin with nothing'
                begun += answer['trajectories']
                await turns(20)
            assert all(g in answer['trajectories'] for g in begun) and len({g[0] for g in begun}) == len(begun) <= len(answer['trajectories']) == n
            early, begun = early + len(begun), []
            await turns(20)
            await desk.feed(ev.StepTrained(1, step, desk.core.issue_version(step, 1)))
        return early

    async def both():
        desk = Desk(n)
        early, _ = await asyncio.wait_for(asyncio.gather(act(desk), produce(desk)), 5)
        assert not desk.batches and desk.ledger.trained_step == steps and desk.ledger.audit() == []
        shown = [g for c in desk.said if isinstance(c, cm.GiveEarly) for g in c.groups]
        assert len(shown) == len(set(shown)) >= early and (n == 1 or early), (shown, early)
    asyncio.run(both())
