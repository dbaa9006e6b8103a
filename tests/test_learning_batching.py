"Packing and alignment, on any lengths that Hypothesis finds"
from functools import cache

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.core.types import Trajectory
from laminar_sdk.learning.batching import balanced_microbatches, collate, padding_waste, row_length

lengths = st.lists(st.integers(0, 300), max_size=60)


def cost(lengths, cut, overhead): return sum(max(max(lengths[i], 1) for i in rows)*len(rows) + overhead for rows in cut)


@given(lengths, st.integers(1, 700), st.integers(0, 100))
def test_every_row_once_within_the_budget_longest_first(lengths, budget, overhead):
    cut = balanced_microbatches(lengths, budget, overhead)
    assert sorted(i for rows in cut for i in rows) == list(range(len(lengths)))
    flat = [lengths[i] for rows in cut for i in rows]
    assert flat == sorted(flat, reverse=True) and all(cut)
    for rows in cut: assert len(rows) == 1 or max(lengths[i] for i in rows)*len(rows) <= budget


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 120), st.integers(0, 20))
def test_no_other_cut_costs_less(lengths, budget, overhead):
    "Against every partition of the rows into sets, neighbours or not"
    @cache
    def best(rows):
        if not rows: return 0
        first, rest = rows[0], rows[1:]
        costs = []
        for pick in range(2**len(rest)):
            mine = (first, *(r for k, r in enumerate(rest) if pick >> k & 1))
            longest = max(lengths[i] for i in mine)
            if len(mine) > 1 and longest*len(mine) > budget: continue
            costs.append(longest*len(mine) + overhead + best(tuple(r for k, r in enumerate(rest) if not pick >> k & 1)))
        return min(costs)
    assert cost(lengths, balanced_microbatches(lengths, budget, overhead), overhead) == best(tuple(range(len(lengths))))


def test_a_long_tail_wastes_little():
    "Issue's bound for a long-tailed batch: 5 % of the tokens"
    for seed in range(5):
        rng = np.random.default_rng(seed)
        L = np.minimum(12 + 12*(1 + rng.pareto(1.3, 512)), 400).astype(int).tolist()
        assert padding_waste(L, balanced_microbatches(L, 16_384)) < .05


def test_a_thousand_rows_take_milliseconds():
    import time
    L = np.random.default_rng(0).integers(1, 2000, 1024).tolist()
    t = time.process_time()
    balanced_microbatches(L, 16_384)
    assert time.process_time() - t < 1


@st.composite
def trajectories(draw):
    made = []
    for i in range(draw(st.integers(1, 6))):
        p, r = draw(st.integers(1, 9)), draw(st.integers(0, 9))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        mask = rng.integers(0, 2, r).astype(np.uint8)
        made.append(Trajectory(id=i, group_id=0, prompt_id=0, sample_index=i, prompt_ids=rng.integers(1, 99, p).astype(np.int32),
                               response_ids=rng.integers(1, 99, r).astype(np.int32), loss_mask=mask,
                               logprobs=np.where(mask, -rng.random(r), np.nan).astype(np.float32)))
    return made


@given(trajectories())
def test_position_t_is_about_token_t_plus_1(made):
    x = collate(made, torch.arange(len(made)) + 1., pad_id=0)
    assert x['input_ids'].shape[1] == max(map(row_length, made))
    for b, t in enumerate(made):
        whole, p, n = [*t.prompt_ids.tolist(), *t.response_ids.tolist()], len(t.prompt_ids), row_length(t)
        assert x['input_ids'][b, :n].tolist() == whole[:-1] and x['attention_mask'][b].tolist() == [1]*n + [0]*(x['input_ids'].shape[1] - n)
        counted = [s for s in range(n) if s + 1 >= p and t.loss_mask[s + 1 - p]] # s predicts whole[s + 1]
        assert x['mask'][b].nonzero()[:, 0].tolist() == counted
        for s in counted:
            assert x['targets'][b, s] == whole[s + 1] and x['logprobs'][b, s] == t.logprobs[s + 1 - p] and x['advantages'][b, s] == b + 1
    assert x['logprobs'].isfinite().all() # a tool's token has none, and nothing of that is left
