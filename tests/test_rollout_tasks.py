"The tasks: sums held to their promises over many seeds, GSM8K from real files, kinds of reasoning-gym whose scorers raise"
import json
import pytest
from laminar_sdk.rollout import arithmetic as a, word_tasks as w


def columns(rows): return {c: [r[c] for r in rows] for c in rows[0] if c != 'prompt'}
def say(text): return [dict(role='assistant', content=text)]


@pytest.mark.parametrize('seed', range(3))
def test_worked_sums_are_right_and_splits_disjoint(seed):
    train, heldout = a.problems(2000, seed), a.problems(500, seed, 'heldout')
    for rows in (train, heldout): assert a.reward([a.worked(p) for p in rows], [p['answer'] for p in rows]) == [1.]*len(rows)
    assert {p['prompt'] for p in train}.isdisjoint(p['prompt'] for p in heldout)
    lengths = sorted(len(a.worked(p)) + 1 for p in train)
    assert lengths[1980] >= 3*lengths[1000] and lengths[-1] < a.MAX_TOKENS


def test_characters_cover_prompts_and_responses():
    import random
    rng = random.Random(0)
    assert all(set(p['prompt'] + a.worked(p, .5, rng)) <= set(a.CHARACTERS) for p in a.problems(500, 3))


def test_gsm8k_original_file(shared_data):
    rows = w.gsm8k(shared_data/'gsm8k_test.jsonl')
    assert len(rows) == 1319 and rows[0]['answer'] == '18' and rows[0]['prompt'][0]['content'].startswith('Janet')
    answers = [r['answer'] for r in rows]
    assert w.gsm8k_reward([say(f'So it is ${x} in all.\nAnswer: {x}.') for x in answers], answers) == [1.]*1319
    assert sum(w.gsm8k_reward([say(f'Answer: {x}1') for x in answers], answers)) == 0


def test_gsm8k_short_columns_compressed(shared_data):
    rows = w.gsm8k(shared_data/'gsm8k_train_short.jsonl.gz', system='Reply briefly.')
    assert len(rows) == 7473 and [m['role'] for m in rows[0]['prompt']] == ['system', 'user']
    assert w.gsm8k_reward([r['answer'] for r in rows], [r['answer'] for r in rows]) == [1.]*7473


@pytest.mark.parametrize('name', 'chain_sum basic_arithmetic letter_counting products spell_backward prime_factorization coin_flip'.split())
def test_gym_oracles_score_and_junk_does_not_raise(name):
    rows, counted = w.reasoning_gym(name, 10, seed=3), []
    rows = json.loads(json.dumps(rows)) # what a table on the disk gives back
    assert w.gym_reward([say(f"Answer: {r['answer']}") for r in rows], **columns(rows)) == [1.]*10
    for junk in ('', '[x', '((', '{"a": []}', 'none of these'):
        assert w.gym_reward([say(junk)]*10, **columns(rows), log_metric=lambda k, v: counted.append(v)) == [0.]*10
    assert len(counted) == 5 and (sum(counted) > 0) == (name == 'prime_factorization')


def test_partial_credit_is_no_credit():
    rows = [r for r in w.reasoning_gym('chain_sum', 60, seed=3) if r['answer'].startswith('-')]
    assert rows and w.gym_reward([say(f"1{r['answer']}0") for r in rows], **columns(rows)) == [0.]*len(rows)


def test_easy_heldout_is_fixed_distinct_and_apart():
    text = lambda rows: [r['prompt'][-1]['content'] for r in rows]
    heldout = w.easy_tasks(200, 0, 'heldout')
    assert len(set(text(heldout))) == 200 and heldout == w.easy_tasks(200, 0, 'heldout')
    assert set(text(heldout)).isdisjoint(text(w.easy_tasks(1000, 1)))
