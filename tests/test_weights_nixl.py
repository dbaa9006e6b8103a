"""Relays as real processes whose bytes go by NIXL, where its package is installed: what `test_relay_faults.py` shows of TCP, as far as no wire of ours is between them.
NIXL runs over TCP here (`UCX_TLS`): without that, UCX takes shared memory on one machine, and nothing is proved"""
import random, signal, statistics, tempfile
from pathlib import Path

import pytest

from laminar_sdk.weights.client import RelayClient
from laminar_sdk.weights.nixl import why_not
from relay_world import World
from test_relay_faults import WHO, others, trial

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or 'nixl is here'), pytest.mark.timeout(180)]
BY_NIXL = {h: ['--transport', 'nixl'] for h in range(4)}

@pytest.fixture(scope='module')
def shared():
    with tempfile.TemporaryDirectory(prefix='lw') as d, pytest.MonkeyPatch.context() as patch:
        patch.setenv('UCX_TLS', 'tcp,self'), patch.setenv('NIXL_LOG_LEVEL', 'WARN')
        with World(Path(d)/'nixl', 4, mb=32, keyframe_every=1000, args=BY_NIXL) as w:
            for form in ('full', 'delta', 'delta'): w.deliver(form, timeout_s=40)
            yield w

@pytest.fixture
def w(shared):
    shared.until(shared.settled, 20, 'a chain at rest')
    shared.did.clear(), shared.reports.clear(), shared.refused.clear()
    yield shared
    assert not shared.wrong, shared.wrong

def test_versions_are_the_same_everywhere(w, figures):
    times = {}
    for form in ('full', 'delta')*4:
        times.setdefault(form, []).append(w.deliver(form, timeout_s=20))
        w.same()
    figures |= {form: statistics.median(t) for form, t in times.items()} | {'came_in': w.stats(w.core.order[-1])['came_in'], 'failures': w.stats(w.core.order[-1])['failures']}

def test_kills_during_broadcasts(w, figures):
    rng = random.Random(2)
    figures['seconds'] = [trial(w, who, rng) for who in WHO for _ in range(2)]

def test_a_sender_that_is_stopped_writes_nothing_later(w, figures):
    "What it had not brought yet when it was stopped does not land, when it wakes, in the memory that newer versions have taken since"
    host = w.core.order[1]
    rest, held = others(w, host), []
    clients = [RelayClient(w.lives[h].socket) for h in rest]
    w.launch('full')
    w.kill(host, signal.SIGSTOP)
    figures['around_s'] = w.until(w.have(*rest), 15, 'a chain around who is stopped')
    for _ in range(3):
        w.deliver('full', *rest, timeout_s=20)
        held = held[-4:] + [c.pull() for c in clients]
    w.kill(host, signal.SIGCONT)
    w.pump(1.)
    for p in held: p.verify(), p.release()
    for c in clients: c.close()
    w.until(w.have(), 20), w.same()

def test_hosts_with_and_without(monkeypatch, figures):
    "Whoever has NIXL uses it with those that have it too"
    monkeypatch.setenv('UCX_TLS', 'tcp,self'), monkeypatch.setenv('NIXL_LOG_LEVEL', 'WARN')
    with tempfile.TemporaryDirectory(prefix='lw') as d, World(Path(d)/'mixed', 4, mb=8, args={h: BY_NIXL[h] for h in (0, 1, 3)}) as w:
        for form in ('full', 'delta', 'full'): w.deliver(form, timeout_s=30), w.same()
        figures['order'] = w.core.order
