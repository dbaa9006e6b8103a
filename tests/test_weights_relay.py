"Relays, actors and readers as real processes: torn reads, kill -9, strangers, flipped bits, no space, leaks"
import json, os, random, secrets, signal, socket, struct, subprocess, sys, tempfile, threading, time
from contextlib import contextmanager
from pathlib import Path

import numpy as np, pytest

from laminar_sdk.core.errors import ClusterError, ConfigError, LaminarError, ResourceError
from laminar_sdk.weights.client import RelayClient
from laminar_sdk.weights.layout import Layout, verify
from laminar_sdk.weights.relay import Relay
from laminar_sdk.weights.transport import Limits, Tcp

MB = 1_000_000
LIMITS = Limits(connect_s=1, handshake_s=1, progress_s=1, probe_s=.3, backoff_s=.2)
LAYOUT = Layout.of({f'layer{i}': ('bfloat16', (1000, 500)) for i in range(8)}) # 8 MB

# ---------------------------------------------------------------- helpers

def write(client, version, layout=LAYOUT):
    "Publish an image whose every byte says which version it is"
    draft = client.begin(layout)
    np.frombuffer(draft.buffer, np.uint8)[:] = version % 251
    draft.seal(version, step=version, incarnation=1)

def whole(pulled):
    "Whether every byte of an image belongs to its version"
    return (np.frombuffer(pulled.buffer, np.uint8) == pulled.version % 251).all()

def within(seconds, condition):
    "Wait until a condition holds; whether it did"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition(): return True
        time.sleep(.01)
    return condition()

def rss_kb(pid): # without the shared pages, which are the images
    facts = dict(line.split(':') for line in Path(f'/proc/{pid}/status').read_text().splitlines() if line.startswith('Rss'))
    return int(facts['RssAnon'].split()[0])

class Process:
    "A relay in a process of its own"
    def __init__(self, folder, name, secret, *args):
        self.socket, key = folder/f'{name}.sock', folder/'key'
        if not key.exists(): key.touch(0o600); key.write_bytes(secret)
        self.p = subprocess.Popen([sys.executable, '-m', 'laminar_sdk.weights.relay', '--socket', str(self.socket), '--name', name,
                                   '--secret-file', str(key), '--while-stdin', *args],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = tuple(json.loads(self.p.stdout.readline())['address'])
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(map(json.loads, self.p.stdout)), daemon=True).start()
    @property
    def peer(self): return '{}:{}'.format(*self.address)
    def kill(self, sig=signal.SIGKILL): self.p.send_signal(sig); sig == signal.SIGKILL and self.p.wait(5)
    def failures(self): return [line for line in self.lines if 'failure' in line]

@pytest.fixture
def home():
    "A short private folder: socket paths end at 107 bytes"
    with tempfile.TemporaryDirectory(prefix='lw') as d: yield Path(d)

@pytest.fixture
def launch(home):
    secret, started = secrets.token_bytes(32), []
    def launch(name='r', *args):
        started.append(Process(home, name, secret, *args))
        return started[-1]
    launch.secret = secret
    yield launch
    for r in started:
        if r.p.poll() is None: r.p.kill()
        r.p.wait(5), r.p.stdin.close(), r.p.stdout.close()

def child(role, *args):
    "This file again, as an actor or a reader"
    return subprocess.Popen([sys.executable, __file__, role, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

@contextmanager
def relays(home, n, secret=None, **kwargs):
    "n relays in this process, a chain"
    secret, made = secret or secrets.token_bytes(32), []
    try:
        for i in range(n): made.append(Relay(f'host{i}', home/f'{i}.sock', secret=secret, limits=LIMITS, **kwargs).start())
        for a, b in zip(made, made[1:]): a.set_peers([b.address])
        yield made
    finally:
        for r in made: r.stop()

# ---------------------------------------------------------------- children

def child_actor(path, versions):
    with RelayClient(path) as client:
        for v in range(int(versions)): write(client, v)
        client.wait_for(int(versions) - 1, timeout_s=30)

def child_reader(path, last, seed):
    "Pull at random, hold at random, look twice; prints what it saw"
    rng, seen, torn, held = random.Random(int(seed)), [], 0, []
    with RelayClient(path) as client:
        print('ready', flush=True)
        client.wait_for(0, timeout_s=30)
        while not seen or seen[-1] < int(last):
            p = client.pull()
            p.verify()
            torn += not whole(p)
            seen.append(p.version)
            held.append(p)
            if rng.random() < .3: time.sleep(rng.random() * .03)
            while held and rng.random() < .6: # release some, after a second look
                q = held.pop(rng.randrange(len(held)))
                torn += not whole(q)
                q.verify(), q.release()
            if len(held) > 3: held.pop(0).release()
        for q in held: torn += not whole(q); q.release()
    print(json.dumps(dict(seen=seen, torn=torn)), flush=True)

def child_holder(path):
    with RelayClient(path) as client, client.pull() as p:
        print(p.version, flush=True)
        sys.stdin.read()
        p.verify()
        print('intact' if whole(p) else 'torn', flush=True)

# ---------------------------------------------------------------- tests

def test_no_torn_read_at_full_speed(launch):
    "Until the readers have met more than ten versions: on a busy machine one life of an actor may pass between two looks"
    met = 0
    for life in range(8):
        met += fifty_versions(launch, life)
        if met > 10: return
    raise AssertionError(f'{met} versions were met')

def fifty_versions(launch, life) -> int: # met by three readers
    relay = launch(f'life{life}')
    readers = [child('reader', relay.socket, 49, 3*life + i) for i in range(3)]
    for r in readers: assert r.stdout.readline() == 'ready\n'
    actor = child('actor', relay.socket, 50)
    results = [json.loads(r.communicate(timeout=60)[0]) for r in readers]
    assert actor.wait(30) == 0 and all(r.returncode == 0 for r in readers)
    assert all(r['torn'] == 0 and r['seen'] == sorted(r['seen']) for r in results)
    with RelayClient(relay.socket) as c:
        assert within(20, lambda: c.stats()['holders'] == 0)
        assert [v.version for v in c.versions()] == [48, 49] and c.stats()['segments'] <= 3 and c.stats()['failures'] == {}
    return sum(len(set(r['seen'])) for r in results)

def test_killed_reader_and_killed_actor_give_back(launch):
    relay = launch()
    with RelayClient(relay.socket) as c:
        write(c, 0), c.wait_for(0, timeout_s=5)
        holder = child('holder', relay.socket)
        assert holder.stdout.readline() == '0\n'
        for v in (1, 2, 3): write(c, v)
        c.wait_for(3, timeout_s=5)
        assert [v.version for v in c.versions()] == [0, 2, 3] and c.stats()['holders'] == 1 # read, so not overwritten
        holder.kill(), holder.wait(5)
        assert within(20, lambda: c.stats()['holders'] == 0) and [v.version for v in c.versions()] == [2, 3]
        holder.stdin.close(), holder.stdout.close()
    actor = child('actor', relay.socket, 10**6)     # a whole life of versions, cut off
    with RelayClient(relay.socket) as c:
        time.sleep(.5)                              # versions ≤ 3 are refused, the actor stops with an error of ours
        actor.kill(), actor.wait(5), actor.stdin.close(), actor.stdout.close()
        write(c, 10**6), c.wait_for(10**6, timeout_s=5)
        with c.pull() as p: p.verify(); assert whole(p)
        assert within(20, lambda: c.stats()['segments'] <= 4)

def test_killed_relay(launch):
    "Mappings outlive it, every question ends at once"
    relay = launch()
    with RelayClient(relay.socket) as c:
        write(c, 0), c.wait_for(0, timeout_s=5)
        holder, mine, draft = child('holder', relay.socket), c.pull(), c.begin(LAYOUT)
        assert holder.stdout.readline() == '0\n'
        ended = []
        def waits():
            try: c.wait_for(5, timeout_s=60)
            except ClusterError: ended.append(time.monotonic())
        t = threading.Thread(target=waits); t.start(); time.sleep(.1)
        relay.kill(); killed = time.monotonic()
        t.join(30); assert ended[0] - killed < 10 # and not the minute that it would wait
        np.frombuffer(draft.buffer, np.uint8)[:] = 1 # the actor's memory is still there
        for ask in (c.pull, c.versions, lambda: draft.seal(1), lambda: write(c, 1)):
            with pytest.raises(ClusterError): ask()
        assert time.monotonic() - killed < 20 and whole(mine)
        assert holder.communicate('', timeout=30)[0] == 'intact\n'

def test_stopped_relay_does_not_hang_its_clients(launch):
    relay = launch()
    c = RelayClient(relay.socket, timeout_s=.3)
    with RelayClient(relay.socket) as patient: write(patient, 0), patient.wait_for(0, timeout_s=20)
    relay.kill(signal.SIGSTOP)
    start = time.monotonic()
    for ask in (c.pull, lambda: c.wait_for(1, timeout_s=.2)):
        with pytest.raises(ClusterError, match='did not answer'): ask()
    assert time.monotonic() - start < 5
    relay.kill(signal.SIGCONT)
    def well():
        try:
            with c.pull() as p: return whole(p)
        except ClusterError: return False # a third of a second is little on a busy machine
    assert within(20, well) # on a new connection

def test_two_hosts_bit_equal_and_strangers_get_nothing(launch):
    b = launch('b')
    a = launch('a', '--peer', b.peer)
    with RelayClient(a.socket) as ca, RelayClient(b.socket) as cb:
        for v in range(10): write(ca, v)
        assert cb.wait_for(9, timeout_s=10) == 9
        with ca.pull(9) as pa, cb.pull(9) as pb: assert pa.buffer == pb.buffer and pa.manifest == pb.manifest and whole(pb)
        before, made = rss_kb(b.p.pid), cb.stats()['segments_made']
        for says in (b'\xff'*72, struct.pack('<Q', 2**63) * 9, b'GET / HTTP/1.1\r\n\r\n' + b'x'*100_000, b''):
            for _ in range(5):
                with socket.create_connection(b.address, 5) as s:
                    s.settimeout(5)
                    try: s.sendall(says); s.shutdown(socket.SHUT_WR); [_ for _ in iter(lambda: s.recv(4096), b'')]
                    except OSError: continue # it hung up on us
        with pytest.raises((ClusterError, OSError)): Tcp(secrets.token_bytes(32), LIMITS).connect(b.address)
        with pytest.raises(ClusterError, match='no relay of this version'): _listen_as_stranger(launch.secret)
        assert within(20, lambda: cb.stats()['failures'].get('stranger', 0) == 21)
        assert cb.stats()['segments_made'] == made and rss_kb(b.p.pid) - before < 4000
        write(ca, 10)
        assert cb.wait_for(10, timeout_s=10) == 10 # and the run goes on

def _listen_as_stranger(secret):
    "A sender of ours meets somebody who merely listens at the port"
    with socket.create_server(('127.0.0.1', 0)) as door:
        threading.Thread(target=lambda: door.accept()[0].sendall(b'x'*100), daemon=True).start()
        Tcp(secret, LIMITS).connect(door.getsockname()[:2])

def test_stranger_that_says_nothing_does_not_keep_peers_out(home):
    with relays(home, 2) as (a, b), RelayClient(a.socket_path) as c:
        silent = [socket.create_connection(b.address) for _ in range(LIMITS.strangers + 8)]
        write(c, 0)
        assert b.shelf.wait(0, 30) == 0 # their second is over, ours comes through
        for s in silent: s.close()

class Faulty(Tcp):
    "A network that does `harm(channel, view)` to what is sent"
    harm = None
    def connect(self, address):
        channel = super().connect(address)
        plain = channel.send_from
        channel.send_from = lambda view: plain(self.harm(channel, view) if self.harm else view)
        return channel

def test_flipped_bit_is_never_visible(home):
    secret, failed, shown = secrets.token_bytes(32), [], []
    net, rng = Faulty(secret, LIMITS), random.Random(0)
    def flip(channel, view, left=[3]):
        if not left[0]: return view
        left[0] -= 1
        view = memoryview(bytearray(view)); view[rng.randrange(len(view))] ^= 1 << rng.randrange(8)
        return view
    a = Relay('a', home/'a.sock', secret=secret, limits=LIMITS, transport=net, on_failure=failed.append).start()
    b = Relay('b', home/'b.sock', secret=secret, limits=LIMITS, on_failure=failed.append, on_version=lambda m, s, n: shown.append(m.version)).start()
    a.set_peers([b.address])
    try:
        with RelayClient(a.socket_path) as ca, RelayClient(b.socket_path) as cb:
            net.harm = flip
            write(ca, 0)
            assert within(20, lambda: sum('checksum' in f.reason for f in failed) == 6) and not within(.2, lambda: shown)
            assert shown == [] and cb.versions() == [] # three times bad: given up
            write(ca, 1)
            assert cb.wait_for(1, timeout_s=20) == 1 and within(20, lambda: shown == [1])
            with ca.pull(1) as pa, cb.pull(1) as pb: assert pa.buffer == pb.buffer
            bad = [f for f in failed if 'checksum' in f.reason]
            assert len(bad) == 6 and {f.what for f in bad} == {'push', 'receive'} and all("tensor 'layer" in f.reason for f in bad)
            assert b.stats()['segments'] <= 3 # what was refused went back
    finally: a.stop(), b.stop()

def test_silent_link_ends_the_transfer_and_the_next_try_succeeds(home):
    secret, net = secrets.token_bytes(32), None
    class Stuck(Faulty):
        def harm(self, channel, view, left=[1]):
            if left[0]: left[0] -= 1; time.sleep(2.5) # more than progress_s: the receiver has left
            return view
    a = Relay('a', home/'a.sock', secret=secret, limits=LIMITS, transport=Stuck(secret, LIMITS)).start()
    b = Relay('b', home/'b.sock', secret=secret, limits=LIMITS).start()
    a.set_peers([b.address])
    try:
        with RelayClient(a.socket_path) as c: write(c, 0)
        assert b.shelf.wait(0, 30) == 0 and b.stats()['failures']['receive'] == 1
        verify(b.shelf.open().bytes, b.versions()[0])
    finally: a.stop(), b.stop()

def test_middle_of_the_chain_is_killed_during_a_broadcast(launch, home):
    big = Layout.of({f'l{i}': ('float32', (1_000_000,)) for i in range(16)}) # 64 MB
    tail, secret = launch('tail'), launch.secret
    middle = launch('middle', '--peer', tail.peer)
    with Relay('head', home/'head.sock', secret=secret, limits=LIMITS) as head, RelayClient(head.socket_path) as c, RelayClient(tail.socket) as ct:
        head.set_peers([middle.address])
        write(c, 0, big), ct.wait_for(0, timeout_s=20)
        with RelayClient(middle.socket) as cm:
            write(c, 1, big)
            assert within(20, lambda: cm.stats()['segments'] > 1)
            middle.kill()
        head.set_peers([tail.address])
        write(c, 2, big)
        assert ct.wait_for(2, timeout_s=20) == 2
        with c.pull(2) as p, ct.pull(2) as q: assert p.buffer == q.buffer and whole(q)
        assert ct.stats()['segments'] <= 3

def test_version_numbers_only_go_up(home):
    with relays(home, 2) as (a, b), RelayClient(a.socket_path) as ca, RelayClient(b.socket_path) as cb:
        write(ca, 5), cb.wait_for(5, timeout_s=5)
        for v in (5, 4, 0):
            with pytest.raises(ConfigError, match='only go up'): write(ca, v)
        write(cb, 7), write(ca, 6), cb.wait_for(7, timeout_s=5)           # another actor was faster on b
        assert within(20, lambda: a.links[b.address].has == 7)             # a has learned it; 6 was not accepted
        assert [m.version for m in b.versions()] == [5, 7]
        a.pin(5), write(ca, 8), write(ca, 9), ca.wait_for(9, timeout_s=5)
        assert within(20, lambda: [m.version for m in a.versions()] == [5, 8, 9]) # the link has let go of 6
        a.unpin(5); assert [m.version for m in a.versions()] == [8, 9]
        with pytest.raises(LaminarError, match='not on this host'): a.pin(5)

def test_no_space(home, monkeypatch):
    failed = []
    with relays(home, 2, on_failure=failed.append, max_bytes=1<<60) as (a, b), RelayClient(a.socket_path) as c:
        with pytest.raises(ResourceError, match=r'1,125,899,906\.8 MB needed, [\d,.]+ MB of memory free'): c.begin(Layout.of(dict(w=('uint8', (1<<50,)))))
        write(c, 0), b.shelf.wait(0, 5)                                  # the relay is none the worse
        made = b.shelf.pool.made
        import laminar_sdk.weights.segments as segments
        draft = c.begin(LAYOUT)
        monkeypatch.setattr(segments, 'free_memory', lambda: 10*MB)      # from here on the host is full
        b.shelf.pool._close(b.shelf.pool.free)
        draft.seal(1)
        assert within(20, lambda: any(f.what == 'push' and 'no space in shared memory: 8.0 MB needed, 10.0 MB' in f.reason for f in failed))
        assert b.versions()[-1].version == 0 and b.shelf.pool.made == made
        monkeypatch.undo()
        assert b.shelf.wait(1, 20) == 1                                  # and again, when there is room
    with relays(home, 1, max_bytes=MB) as (a,), RelayClient(a.socket_path) as c:
        with pytest.raises(ResourceError, match='max_bytes'): c.begin(LAYOUT)

def test_memory_stays_flat(launch):
    "300 versions: no segment, descriptor or page more than after 100"
    b = launch('b')
    a = launch('a', '--peer', b.peer)
    def held(r): return len(os.listdir(f'/proc/{r.p.pid}/fd')), rss_kb(r.p.pid)
    with RelayClient(a.socket) as ca, RelayClient(b.socket) as cb:
        facts = []
        for v in range(300):
            write(ca, v)
            if v % 10 == 0:
                ca.wait_for(v, timeout_s=5)
                with ca.pull() as p: assert whole(p)
            if v in (100, 299):
                cb.wait_for(v, timeout_s=10), time.sleep(.3)
                facts.append([*held(a), *held(b), len(os.listdir('/proc/self/fd')), len(ca.writer.mapped), ca.stats()['bytes'], cb.stats()['bytes']])
        early, late = facts
        for i in (0, 2, 4, 5): assert late[i] <= early[i] + 3 # descriptors (a link may be in the middle of a connection), mappings
        for i in (1, 3): assert late[i] - early[i] < 8000     # kB: scratch of a block may settle in one more thread's arena
        assert late[6] <= 5 * 8.1 * MB and late[7] <= 3 * 8.1 * MB # a: two kept, a draft; of a link that is behind, what it sends and what that builds on
        assert ca.stats()['segments_made'] < 12 and cb.stats()['segments_made'] == 3

def test_many_threads_share_a_client(home):
    with relays(home, 1) as (relay,), RelayClient(relay.socket_path) as c:
        write(c, 0), c.wait_for(0, timeout_s=5)
        errors, done = [], threading.Event()
        def read():
            try:
                while not done.is_set():
                    with c.pull() as p: p.verify(); errors.extend([] if whole(p) else ['torn'])
                    c.stats(), c.versions()
            except Exception as e: errors.append(e)
        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads: t.start()
        for v in range(1, 60): write(c, v)
        done.set()
        for t in threads: t.join(10)
        assert not errors and within(20, lambda: c.stats()['holders'] == 0)

def test_interrupted_question_keeps_what_is_held(home):
    "An interrupted cell breaks a connection off; a tensor in use is still not overwritten"
    with relays(home, 1) as (relay,), RelayClient(relay.socket_path) as c:
        write(c, 0), c.wait_for(0, timeout_s=5)
        held = c.pull()
        c.reader.line.recv = lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt): c.pull()
        for v in range(1, 6): write(c, v)
        c.wait_for(5, timeout_s=5)
        assert whole(held) and 0 in [v.version for v in c.versions()]
        held.release()
        assert within(20, lambda: [v.version for v in c.versions()] == [4, 5] and c.stats()['holders'] == 0)

if __name__ == '__main__': globals()[f'child_{sys.argv[1]}'](*sys.argv[2:])
