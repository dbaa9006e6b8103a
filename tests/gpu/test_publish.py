"Publishing from a device: pinned shared memory, one casting copy, the right values"
import secrets, statistics, tempfile, time
import pytest, torch

for package in ('msgspec', 'xxhash', 'fastcore'): pytest.importorskip(package)
from laminar_sdk.weights.client import RelayClient
from laminar_sdk.weights.relay import Relay


def test_publish_from_the_device(figures):
    model = {f'layer{i}': torch.randn(4_000_000, device='cuda') for i in range(32)} # 256 MB as bf16
    with tempfile.TemporaryDirectory() as d, Relay('gpu', f'{d}/r.sock', secret=secrets.token_bytes(32)) as relay:
        with RelayClient(relay.socket_path, publish_dtype='bfloat16') as actor, RelayClient(relay.socket_path) as rollout:
            reports = []
            for version in range(12):
                for x in model.values(): x.add_(1e-3)
                torch.cuda.synchronize()
                reports.append(actor.publish(version, model))
                rollout.wait_for(version)
            with rollout.pull(11) as got:
                got.verify()
                assert all(torch.equal(x.cuda(), model[name].bfloat16()) for name, x in got.views().items())
            assert all(d._pinned for d in actor.writer.mapped.values())
        pinned = {name: torch.empty(x.shape, dtype=torch.bfloat16, pin_memory=True) for name, x in model.items()}
        def copy():
            start = time.perf_counter()
            for name, x in model.items(): pinned[name].copy_(x, non_blocking=True)
            torch.cuda.synchronize()
            return time.perf_counter() - start
        copies = [copy() for _ in range(10)][2:]
    stall = statistics.median(r.stall_s for r in reports[4:])
    figures.update(stall_s=stall, copy_s=statistics.median(copies), ratio=stall/statistics.median(copies))
    assert figures['ratio'] < 1.5
