"Stop strings in token streams: found where they end, in whatever pieces they come"
import random
from pathlib import Path
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from laminar_sdk.core.errors import ConfigError
from laminar_sdk.rollout.stops import Codec, Reader, Scan, Stops, TextStream

TEXT = 'def f(x):\n    return "naïve €uro 日本語"\n</python> <python>print(1)</python></pyth </tool>\n' * 3


def byte_level(size=420):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size, special_tokens=['<|end|>'], show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t

def sentence_piece():
    "As Llama 2 has it: ▁ for a space, bytes for what it does not know"
    words = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), *'▁abcdefghijklmnopqrstuvwxyz()</>1\n:"', '▁p', 'py', '</', 'th', 'on', '>\n']
    vocab = {w: i for i, w in enumerate(dict.fromkeys(words))}
    merges = [('▁', 'p'), ('p', 'y'), ('<', '/'), ('t', 'h'), ('o', 'n'), ('>', '\n')]
    t = Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    t.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    return t

CODECS = dict(byte_level=Codec(byte_level()), sentence_piece=Codec(sentence_piece()))


@pytest.mark.parametrize('name', CODECS)
@given(text=st.text(alphabet=list('abp </>ython1\n€ï日"'), max_size=30))
def test_text_there_and_back(name, text):
    codec = CODECS[name]
    ids, stream = codec.encode(text), TextStream(codec)
    assert codec.text(ids).removeprefix(' ' * (name == 'sentence_piece' and text != '')) == text
    assert ''.join(stream.feed([i]) for i in ids) + stream.close() == codec.text(ids) # never half a character


class Pieces:
    "A codec of made-up tokens"
    def __init__(self, pieces): self.pieces = pieces
    def piece(self, i): return self.pieces[i]
    def bytes(self, ids): return b''.join(self.pieces[i] for i in ids)

def by_looking(strings, pieces, ids):
    "By definition: decode everything again after each token"
    for n in range(1, len(ids) + 1):
        before, text = (b''.join(pieces[i] for i in ids[:k]) for k in (n - 1, n))
        ends = [(text.find(s, max(0, len(before) - len(s) + 1)) + len(s), -len(s), s) for s in strings if text.find(s, max(0, len(before) - len(s) + 1)) >= 0]
        if ends: return min(ends)[2].decode(), n, text[min(ends)[0]:]

@settings(max_examples=400)
@given(st.lists(st.text('ab<', min_size=1, max_size=4), min_size=1, max_size=3, unique=True), st.lists(st.text('ab<', max_size=4), min_size=1, max_size=6),
       st.lists(st.integers(0, 5), max_size=12), st.integers(0, 99))
def test_what_is_found_is_what_one_finds_by_looking(strings, pieces, ids, seed):
    pieces, ids = [p.encode() for p in pieces], np.array([i % len(pieces) for i in ids], np.int64)
    stops, expected = Stops(strings, Pieces(pieces)), by_looking([s.encode() for s in strings], pieces, ids)
    cuts = sorted({0, len(ids), *random.Random(seed).choices(range(len(ids) + 1), k=3)})
    scan, found = Scan(stops), None
    for a, b in zip(cuts, cuts[1:]): # in whatever chunks they come
        if hit := scan.feed(ids[a:b]):
            found = hit.stop, a + hit.tokens, hit.beyond
            break
    assert found == expected
    if found: # a token that holds a whole stop string is among those that the engine gets
        for i in stops.token_ids: assert any(s.encode() in pieces[i] for s in strings)


@pytest.mark.parametrize('name', CODECS)
def test_a_tag_in_every_position_of_a_real_tokenizer(name):
    codec, rng = CODECS[name], random.Random(0)
    reader = Reader(codec, ['</python>', '</tool>'], end_ids=[0])
    for _ in range(300):
        tag = rng.choice(['</python>', '</tool>'])
        before, after = (''.join(rng.choices('ab</python>t \n(1)', k=rng.randrange(12))) for _ in range(2))
        whole = before + tag + after
        first = min(whole.find(t) + len(t) for t in reader.stops.strings if t in whole)
        ids, scan = codec.encode(whole), Scan(reader.stops)
        n, hit = next((n, h) for n in range(1, len(ids) + 1) if (h := scan.feed(ids[n - 1:n])))
        assert reader.how_ended(ids[:n - 1]) is None and reader.how_ended(ids[:n]) == 'tag'
        assert reader.text(ids[:n]).strip() == whole[:first].strip() # the text ends with the tag, whatever the last token goes on with
        assert codec.text(ids[:n]).endswith(hit.stop + hit.beyond.decode(errors='replace'))


def test_special_tokens_cannot_be_said_by_a_tool():
    codec = CODECS['byte_level']
    assert codec.encode('a<|end|>', special=True).tolist()[-1] == 0 and 0 not in codec.encode('a<|end|>')
    assert codec.piece(10 ** 6) == b'' # an embedding with padding


def test_a_tokenizer_that_cannot_be_read_by_bytes_is_refused():
    class Odd: # says that it is byte-level, and is not
        def to_str(self):
            t = byte_level()
            t.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace('e', 'x')])
            return t.to_str()
    with pytest.raises(ConfigError, match='by its bytes'): Codec(Odd())
    with pytest.raises(ConfigError, match='depends on its neighbours'): Codec(Tokenizer(models.WordPiece({'[UNK]': 0}, unk_token='[UNK]')))
    with pytest.raises(ConfigError, match='empty'): Stops([''], CODECS['byte_level'])
