"The prompt store: any source, the same rows; bad data is found before anything starts, and a long prompt is no error"
import gzip, json, subprocess, sys
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from laminar_sdk.core.errors import ConfigError, MissingError
from laminar_sdk.data.prompts import PromptStore
from laminar_sdk.data.sources import tables


class Chars:
    "A tokenizer of characters, with a BOS by its own default and no chat template"
    chat_template = None
    def __call__(self, texts): return dict(input_ids=[[1, *map(ord, t)] for t in texts])

class Chat(Chars):
    chat_template = 'yes'
    def apply_chat_template(self, messages, add_generation_prompt, continue_final_message, tokenize, return_dict):
        assert tokenize and not return_dict and add_generation_prompt != continue_final_message
        return [ord(c) for m in messages for c in f"{m['role'][0]}:{m['content']}"] + [ord('>')] * add_generation_prompt


values = st.fixed_dictionaries(dict(prompt=st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=9)),
                               optional=dict(answer=st.integers(-9, 9), level=st.text('abc', max_size=3), tags=st.lists(st.integers(0, 9), max_size=3)))

@settings(max_examples=30)
@given(st.lists(values, min_size=1, max_size=12), st.integers(1, 4))
def test_rows_come_back_in_order(tmp_path_factory, rows, chunk):
    "Ragged rows, in chunks that know different columns"
    folder = tmp_path_factory.mktemp('p')
    with pytest.MonkeyPatch.context() as m:
        m.setattr('laminar_sdk.data.sources.CHUNK', chunk)
        m.setattr('os.fsync', lambda fd: None)
        store = PromptStore(folder).write(iter(rows))
        ready = store.tokenize(Chars(), max_model_len=8) if any(len(r['prompt']) + 2 <= 8 for r in rows) else None
    names = list(dict.fromkeys(k for r in rows for k in r))
    assert set(store.columns) == set(names) and len(store) == len(rows)
    assert store.rows(range(len(rows))) == [{n: r.get(n) for n in store.columns} for r in rows]
    if ready is None: return
    assert ready.usable.tolist() == [i for i, r in enumerate(rows) if len(r['prompt']) + 2 <= 8]
    assert ready.skipped == [(i, len(r['prompt']) + 1) for i, r in enumerate(rows) if len(r['prompt']) + 2 > 8]
    for i in ready.usable: assert ready.prompt_ids(i).tolist() == [1, *map(ord, rows[i]['prompt'])] and ready.prompt_ids(i).dtype == np.int32
    assert sorted(p.name for p in folder.iterdir()) == ['train.arrow', 'train.tokens.arrow'] # no scratch is left


def test_integers_then_fractions_then_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr('laminar_sdk.data.sources.CHUNK', 1)
    rows = [dict(prompt='a', x=1), dict(prompt='b', x=.5), dict(prompt='c', y='z')]
    assert [(r['x'], r['y']) for r in PromptStore(tmp_path).write(rows).rows(range(3))] == [(1., None), (.5, None), (None, 'z')]
    with pytest.raises(ConfigError, match='x'): PromptStore(tmp_path, 'bad').write([dict(prompt='a', x=1), dict(prompt='b', x='one')])


@pytest.mark.parametrize('source, template, says', [
    ([], None, 'no rows'), (iter(()), None, 'no rows'), ([{}], None, 'no rows'),
    ([dict(question='3+4?')], None, "'question'"),
    ([dict(question='3+4?')], '{qestion}\nAnswer:', "'qestion'; the data has 'question'"),
    ([dict(question='3+4?')], r'{question} \boxed{}', 'braces'),
    ([dict(question='3+4?')], [dict(role='user', content='{q}')], "'q'"),
    ([dict(question='3+4?')], lambda r: r['answer'], 'row 0'),
    ([dict(prompt='a'), dict(prompt='')], None, 'row 1'),
    ([dict(prompt='a'), dict(prompt=None)], None, 'row 1'),
    ([dict(prompt=7)], None, 'row 0'),
    ([dict(prompt=[])], None, 'row 0'),
    ([dict(prompt=[dict(text='hi')])], None, 'row 0'),
    ([dict(prompt='a', log_metric=1)], None, 'log_metric'),
    (['text'], None, 'dict'),
    (dict(train=[dict(prompt='a')]), None, "dataset['train']"),
    ('nowhere.jsonl', None, 'no prompts at'),
])
def test_bad_data_is_refused_in_words(tmp_path, source, template, says):
    with pytest.raises((ConfigError, MissingError)) as e: PromptStore(tmp_path).write(source, template)
    assert says in str(e.value) and e.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_refused_write_leaves_the_old_prompts(tmp_path):
    store = PromptStore(tmp_path).write([dict(prompt='a')])
    with pytest.raises(ConfigError): store.write([dict(prompt='b'), dict(prompt=None)])
    assert PromptStore(tmp_path).row(0) == dict(prompt='a')


def test_prompts_longer_than_the_model_are_counted(tmp_path):
    store = PromptStore(tmp_path).write([dict(prompt='a' * n) for n in (3, 5, 6, 7, 90)])
    ready = store.tokenize(Chars(), max_model_len=8) # with BOS: 4, 6, 7, 8, 91 tokens
    assert ready.usable.tolist() == [0, 1, 2] and ready.skipped == [(3, 8), (4, 91)] # 7 + 1 fits, 8 + 1 does not
    with pytest.raises(ValueError, match='skipped'): ready.prompt_ids(3)
    assert store.tokenize(Chars(), max_model_len=8, at_least=3).usable.tolist() == [0]
    with pytest.raises(ConfigError, match='shortest has 4 tokens'): store.tokenize(Chars(), max_model_len=4)


def test_conversations(tmp_path):
    rows = [dict(prompt=[dict(role='system', content='s'), dict(role='user', content='hi', name='x')]),
            dict(prompt=[dict(role='user', content='hi'), dict(role='assistant', content='We')])]
    store = PromptStore(tmp_path).write(rows)
    assert store.conversational and store.rows([0, 1]) == rows # without the nulls of keys that others have
    ready = store.tokenize(Chat(), 100)
    assert [''.join(map(chr, ready.prompt_ids(i))) for i in (0, 1)] == ['s:su:hi>', 'u:hia:We'] # the second goes on from its last words
    with pytest.raises(ConfigError, match='chat template'): store.tokenize(Chars(), 100)


def test_the_same_in_another_process(tmp_path):
    store = PromptStore(tmp_path, 'eval').write([dict(prompt=f'{i}+1=', answer=str(i + 1)) for i in range(5000)])
    store.tokenize(Chars(), 64)
    code = (f'from laminar_sdk.data.prompts import PromptStore; s = PromptStore({str(tmp_path)!r}, "eval")\n'
            'print(s.fingerprint(), s.row(4321)["answer"], s.prepared().prompt_ids(4321).sum())')
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    assert out == [store.fingerprint(), '4322', str(store.prepared().prompt_ids(4321).sum())]


def test_gsm8k(tmp_path, shared_data):
    store = PromptStore(tmp_path).write(shared_data/'gsm8k_train_short.jsonl.gz', template=[dict(role='user', content='{q}')])
    first = json.loads(gzip.open(shared_data/'gsm8k_train_short.jsonl.gz', 'rt').readline())
    assert store.row(0) == {'prompt': [dict(role='user', content=first['q'])], **first}
    assert sum(len(t) for t in tables(shared_data/'gsm8k_test.jsonl')) == sum(1 for _ in open(shared_data/'gsm8k_test.jsonl'))


def test_several_sources_know_their_rows_also_after_long_prompts_were_skipped(tmp_path):
    from laminar_sdk.core.config import Mixture
    rows = {'b': [dict(prompt='x' * n, level=n) for n in (1, 9, 2)], 'a': (dict(prompt='y', answer='1') for _ in range(2))} # a generator: seen once
    store = PromptStore(tmp_path).write(rows)
    ready = store.tokenize(Chars(), max_model_len=8)
    assert ready.usable.tolist() == [0, 2, 3, 4] and store.sources(ready.usable) == dict(b=2, a=2) and list(store.sources([])) == ['b', 'a']
    assert [r['source'] for r in store.rows(range(5))] == ['b'] * 3 + ['a'] * 2 and store.row(4)['answer'] == '1' and store.row(4)['level'] is None
    assert PromptStore(tmp_path).sources([1, 4]) == dict(b=1, a=1) # another process
    one = PromptStore(tmp_path, 'own').write([dict(prompt='a', source='web')]) # a column of that name alone makes no mixture
    assert one.sources([0]) == {}
    explicit = PromptStore(tmp_path, 'splits').write(Mixture({'train': [dict(prompt='a')], 'test': [dict(prompt='b')]}))
    assert explicit.sources([0, 1]) == dict(train=1, test=1)


def test_a_data_set_with_all_its_splits_is_no_mixture(tmp_path):
    import datasets
    splits = datasets.DatasetDict(easy=datasets.Dataset.from_list([dict(prompt='a')]))
    for bad, says in ((splits, 'splits'), ({'train': [dict(prompt='a')]}, 'splits'), ({'a': [dict(prompt='a', source='web')]}, 'of its own'), ({'a': []}, "'a' has no rows"),
                      ({'a': ['text']}, 'a prompt is a dict')):
        with pytest.raises(ConfigError, match=says): PromptStore(tmp_path).write(bad)
