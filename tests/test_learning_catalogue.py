"Every algorithm of the registry, on the batches that usually break one: it has a formula and a source, and gives numbers"
import json, re, runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from laminar_sdk.core.errors import ConfigError
from laminar_sdk.learning.catalogue import ADVANTAGES, AGGREGATIONS, CORRECTIONS, DATA, LOSSES, PARTS, REGISTRIES, catalogue
from laminar_sdk.learning.losses import log_ratio

ENTRIES = [pytest.param(registry, name, id=f'{registry}-{name}') for registry, entries in REGISTRIES.items() for name in entries]
NAN = float('nan')


def batch(kind):
    "Data by name; where masked stands NaN, as an engine leaves it. Rows: B answers, three groups"
    rng = torch.Generator().manual_seed(0)
    B, T = dict(empty_batch=(0, 4), no_time=(6, 0)).get(kind, (6, 4))
    mask = torch.rand(B, T, generator=rng) < .7
    if kind == 'all_masked': mask[:] = False
    if kind == 'some_rows_empty': mask[::2] = False
    random = lambda scale=1.: torch.where(mask, torch.randn(B, T, generator=rng)*scale, NAN)
    new = -random().abs()
    old = new + random(50. if kind == 'far_away' else .3)
    rewards = torch.full((B,), .1) if kind == 'equal_rewards' else torch.rand(B, generator=rng)
    groups = torch.arange(B) if kind == 'groups_of_one' else torch.arange(B) % 3
    leaf = new.clone().requires_grad_()
    return dict(rewards_B=rewards, group_B=groups, greedy_B=rewards.flip(0), rewards=torch.where(mask, random(), 0.), values=random().requires_grad_(), old_values=random(),
                targets=random(), mask=mask, new=leaf, old=old, proximal=old + random(.1), log_ratio=log_ratio(leaf, old, mask), gap=new - old,
                staleness=torch.arange(B), advantages=random(), loss=random().requires_grad_(), tokens=int(mask.sum()), sequences=int(mask.any(1).sum()),
                logits=torch.randn(B, T, 5, generator=rng).requires_grad_(), lengths_B=mask.sum(1), finish_reasons=['length', 'stop']*(B//2)), mask


KINDS = ['usual', 'all_masked', 'some_rows_empty', 'equal_rewards', 'groups_of_one', 'far_away', 'no_time', 'empty_batch']
OPTIONS = dict(constant_mean=dict(length=16), kl_rewards=dict(beta=.1), overlong_penalty=dict(limit=4, cache=2))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('registry, name', ENTRIES)
def test_value_and_gradient_are_numbers(registry, name, kind):
    data, mask = batch(kind)
    entry = REGISTRIES[registry][name]
    out = entry(data, **OPTIONS.get(name, {}))
    if name == 'uniform_groups': assert isinstance(out, list); return
    shape = dict(zip(['[B]', '[B, T]', 'scalar'], [mask.shape[:1], mask.shape, ()]))[entry.gives.split(' bool')[0].split(' log')[0]]
    assert out.shape == shape
    seen = out if out.ndim < 2 else out[mask]
    assert seen.isfinite().all()
    if registry in ('ADVANTAGES', 'CORRECTIONS') or name == 'overlong_filter': assert not out.requires_grad; return
    leaves = {k: v for k, v in data.items() if isinstance(v, torch.Tensor) and v.is_leaf and v.requires_grad}
    if not out.requires_grad: assert name in ('overlong_penalty', 'kl_rewards'); return
    grads = torch.autograd.grad((torch.where(mask, out, 0.) if out.ndim == 2 else out).sum(), list(leaves.values()), allow_unused=True)
    assert any(g is not None for g in grads)
    for g in grads:
        if g is not None: assert g.isfinite().all() and g[~mask].eq(0).all()


@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_losses_aggregated_in_micro_batches_add_up(name, aggregation):
    "Each loss with each aggregation and a correction: the gradient of the whole is the sum of the rows'"
    data, mask = batch('some_rows_empty')
    def gradient(rows):
        part = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        leaf = part['new'].detach().requires_grad_()
        part |= dict(new=leaf, log_ratio=log_ratio(leaf, part['old'], part['mask']))
        part['loss'] = LOSSES[name](part)*CORRECTIONS['token_tis'](part)
        return torch.autograd.grad(AGGREGATIONS[aggregation](part, **OPTIONS.get(aggregation, {})), leaf)[0]
    whole = gradient(slice(0, 6))
    parts = torch.cat([gradient(slice(0, 1)), gradient(slice(1, 4)), gradient(slice(4, 6))])
    assert whole.abs().max() > 0 and torch.allclose(parts, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize('name', [name for name in ADVANTAGES if name not in ('remax', 'gae', 'reinforce_pp', 'reinforce_pp_baseline')])
def test_a_group_that_teaches_nothing_gets_exactly_zero(name):
    for kind in ('equal_rewards', 'groups_of_one'): assert ADVANTAGES[name](batch(kind)[0]).eq(0).all()


@pytest.mark.parametrize('registry, name', ENTRIES)
def test_every_entry_says_what_it_is(registry, name):
    entry = REGISTRIES[registry][name]
    assert entry.formula and re.search(r'arXiv \d{4}\.\d{5}|(19|20)\d\d$|(19|20)\d\d;', entry.source), entry.source
    assert entry.use and entry.write and all(c.count('`') % 2 == 0 for c in (entry.use, entry.note))
    assert entry.needs and set(entry.data) <= DATA.keys() and entry.fixed.keys().isdisjoint(entry.options)
    assert entry.fn.__doc__ and f'`{name}`' in catalogue(registry)
    with pytest.raises(ConfigError, match=entry.needs[0]): entry({})
    with pytest.raises(ConfigError, match='no option'): entry(batch('usual')[0], **OPTIONS.get(name, {}), nonsense=1)
    for option in entry.fixed:
        with pytest.raises(ConfigError, match='no option'): entry(batch('usual')[0], **{option: entry.fixed[option]})


def test_every_name_of_data_is_used():
    used = {k for entries in REGISTRIES.values() for entry in entries.values() for k in entry.data}
    assert used == DATA.keys()


def test_no_two_entries_compute_the_same():
    "Names that differ stand for algorithms that differ, on a batch that lies far off and is weighed"
    data, mask = batch('usual')
    data |= dict(log_ratio=torch.where(mask, torch.linspace(-2, 2, mask.numel()).view(mask.shape), 0.), gap=torch.linspace(-2, 2, mask.numel()).view(mask.shape))
    for entries in (ADVANTAGES, LOSSES, AGGREGATIONS, CORRECTIONS, PARTS):
        outs = {}
        for name, entry in entries.items():
            out = entry(data, **OPTIONS.get(name, {}))
            if name == 'uniform_groups': continue
            out = out.detach().double()
            outs[name] = (out[:, None].expand(mask.shape) if out.ndim == 1 else out.expand(mask.shape))[mask].numpy()
        names = list(outs)
        for i, a in enumerate(names):
            for b in names[:i]: assert not np.allclose(outs[a], outs[b]), (a, b)


def test_the_page_of_algorithms_says_what_the_registry_says():
    "Tables and pictures of nbs/30_algorithms.ipynb; `python scripts/algorithms.py` makes them"
    root = Path(__file__).resolve().parent.parent
    made, nbs = runpy.run_path(str(root/'scripts'/'algorithms.py')), root/'nbs'
    shown = {''.join(c['source']) for c in json.loads((nbs/'30_algorithms.ipynb').read_text())['cells']}
    for name, table in made['tables']().items(): assert f'{made["marked"](name)}\n\n{table}' in shown, name
    for name, draw in made['PICTURES'].items():
        kept, text = (nbs/'images'/f'algorithms_{name}.svg').read_text(), re.compile('<(?:text|tspan)[^>]*>([^<]*)')
        assert text.findall(kept) == text.findall(draw()) and any(f'images/algorithms_{name}.svg' in cell for cell in shown), name
