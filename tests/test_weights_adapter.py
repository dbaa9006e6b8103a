"""The sum of an adapter against NumPy, step by step in fp32: any shape, rank, dtype, block and number of threads. Actors and rollouts of any kind rest on its bits"""
import os, subprocess, sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.weights.adapter import BLOCK, About, Base, Round, byte_sum, is_adapter, merge, pack, unpack, value_sum
from laminar_sdk.weights.layout import Layout, Manifest, checksum, verify, views

dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def stepwise(W, A, B, scale):
    "x ← W; x ← x + (s·B)·A, in NumPy's fp32: a product, then a sum, each rounded"
    x, left = W.copy(), B*np.float32(scale)
    for k in range(len(A)): x = x + left[:, k:k + 1]*A[k]
    return x


def made(rng, rows, columns, rank, dtype):
    A, B = ((rng.standard_normal(s)*10.**rng.integers(-3, 2)).astype(np.float32) for s in ((rank, columns), (rows, rank)))
    return torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32)).to(dtype), A, B


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 12), dtypes, dtypes, st.sampled_from([.25, 1., 2., 16/3]), st.sampled_from([1, 50, 1 << 15]), st.integers(0, 2**32 - 1))
def test_every_bit_is_numpys(rows, columns, rank, stored, published, scale, block, seed):
    W, A, B = made(np.random.default_rng(seed), rows, columns, rank, stored)
    want = torch.from_numpy(stepwise(W.float().numpy(), A, B, scale)).to(published)
    before, BLOCK['cpu'] = BLOCK['cpu'], block
    try: got = merge(W, torch.from_numpy(A), torch.from_numpy(B), scale, torch.empty(rows, columns, dtype=published))
    finally: BLOCK['cpu'] = before
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) or torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_threads_and_instruction_sets_make_no_difference():
    "The same sum in processes with one and with two threads, with AVX512, AVX2 and none: what separates a rollout's host from the actor's"
    code = '''import sys
import numpy as np, torch
from laminar_sdk.weights.adapter import BLOCK, byte_sum, merge
torch.set_num_threads(int(sys.argv[1])); BLOCK['cpu'] = 1 << 20
rng = np.random.default_rng(0) # torch's own normal numbers depend on the instruction set
W, A, B = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in ((700, 900), (8, 900), (700, 8)))
print(torch.backends.cpu.get_cpu_capability(), byte_sum(merge(W, A, B, 2., torch.empty(700, 900))))'''
    said = {}
    for threads, isa in ((1, ''), (2, 'avx2'), (1, 'default')):
        env = os.environ | dict(OMP_NUM_THREADS=str(threads)) | (dict(ATEN_CPU_CAPABILITY=isa) if isa else {})
        name, total = subprocess.run([sys.executable, '-c', code, str(threads)], capture_output=True, text=True, check=True, env=env).stdout.rsplit(' ', 1)
        said[name, threads] = total
    assert len(said) > 1 and len(set(said.values())) == 1, said


@pytest.mark.parametrize('budget', [0, 1000, 10**9])
def test_in_turn_each_is_summed(budget):
    tensors = [torch.full((n,), 1., dtype=torch.bfloat16) for n in (10, 2000, 30, 400, 50)]
    turn, seen = Round(5, budget or 1), torch.zeros(5, dtype=torch.int64)
    for _ in range(5):
        sums = turn(tensors)
        assert all(s in (0, byte_sum(x)) for s, x in zip(sums.tolist(), tensors)) and sums.any()
        seen += sums != 0
    assert seen.min() >= 1 and (seen == 5).all() == (budget == 10**9)


def test_there_and_back_through_an_image():
    layers = {f'layers.{i}.q.weight': (torch.randn(4, 6), torch.randn(5, 4)) for i in range(3)}
    about = About(4, 2., 'bfloat16', ('q',), {n: value_sum(torch.randn(5, 6)) for n in layers})
    named = pack(about, layers, torch.tensor([3, 0, -7]))
    layout = Layout.of(named)
    memory = bytearray(layout.nbytes)
    for n, x in views(memory, layout).items(): x.copy_(named[n])
    verify(memory, Manifest(1, layout, checksum(memory, layout)))
    read = unpack(views(memory, layout))
    assert is_adapter(layout) and read.about == about and [*read.sums.values()] == [3, 0, -7] and read.layers.keys() == layers.keys()
    assert all(torch.equal(a, b) for n in layers for a, b in zip(read.layers[n], layers[n]))


def test_a_base_in_several_files(tmp_path):
    "The index says where; a file that it does not name is not looked at"
    import json
    from safetensors.torch import save_file
    x = torch.randn(3, 4)
    save_file(dict(a=x), tmp_path/'model-1.safetensors'), save_file(dict(b=x + 1), tmp_path/'model-2.safetensors'), save_file(dict(a=x + 9), tmp_path/'other.safetensors')
    (tmp_path/'model.safetensors.index.json').write_text(json.dumps(dict(weight_map=dict(a='model-1.safetensors', b='model-2.safetensors'))))
    base = Base(tmp_path)
    base.prove(About(1, 1., 'bfloat16', (), dict(a=value_sum(x), b=value_sum(x + 1))))
    assert sorted(base.where) == ['a', 'b'] and torch.equal(base['a'], x)
