"""Several ranks of one actor as real processes, on one host and on two, each of which writes its own part: what appears is whole, or it does not appear"""
import json, os, queue, random, secrets, signal, socket, subprocess, sys, tempfile, threading, time
from contextlib import suppress
from pathlib import Path

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st

from laminar_sdk.core.errors import ClusterError, LaminarError, MissingError
from laminar_sdk.weights.client import RelayClient
from laminar_sdk.weights.gathering import Gathering
from laminar_sdk.weights.layout import Layout, views
from laminar_sdk.weights.parts import Part, pack, packed, place, tile
from laminar_sdk.weights.store import Shelf

LAYOUT = Layout.of(dict(embed=('bfloat16', (1001, 512)), up=('float32', (512, 1024)), down=('bfloat16', (1024, 512)), norm=('float32', (3,)), scale=('float32', ())))

# ---------------------------------------------------------------- what ranks have

def model(version, layout=LAYOUT):
    "The weights that a version has; every rank can make all of them, so that a test can compare"
    g = torch.Generator().manual_seed(version)
    return {t.name: torch.randn(t.shape, generator=g).to(getattr(torch, t.dtype)) for t in layout.tensors}

def columns(rank, ranks): # rows of the embedding, columns of `up`, rows of `down`; what is small is rank 0's
    def cut(n): return n*rank//ranks, n*(rank + 1)//ranks - n*rank//ranks
    (e, ne), (u, nu), (d, nd) = cut(1001), cut(1024), cut(1024)
    small = dict(norm=((0,), (3,)), scale=((), ())) if rank == 0 else {}
    return Part.of(rank, ranks, dict(embed=((e, 0), (ne, 512)), up=((0, u), (512, nu)), down=((d, 0), (nd, 512))) | small)

CUTS = dict(rows=lambda rank, ranks: Part.rows(LAYOUT, rank, ranks), columns=columns)

def rank_main(files, path, rank, ranks, cut, rows):
    "A rank: obeys a line of JSON at a time"
    commands, out = files
    def say(**facts): print(json.dumps(facts), file=out, flush=True)
    layout = Layout.of({t.name: (t.dtype, t.shape) for t in LAYOUT.tensors} | dict(embed=('bfloat16', (rows, 512))))
    part = CUTS[cut](rank, ranks) if layout == LAYOUT else Part.rows(layout, rank, ranks)
    client = RelayClient(path)
    client.share(layout, part)
    def mine(version): return {s.name: model(version, layout)[s.name][s.box] for s in part.slices}
    for line in commands:
        do, version, path = json.loads(line)
        try:
            if do == 'half': # of its copy is made
                client.begin(layout).views()['embed'].copy_(mine(version)['embed'])
                say(half=version)
            elif do == 'give':
                old, client = client, RelayClient(path)
                client.follow(old)
                say(given=client.writer.sealed.hand_to(path) if client.writer.sealed else None)
            else:
                r = client.publish(version, mine(version), step=version)
                say(version=version, stall_s=r.stall_s, copy_s=r.copy_s, nbytes=r.nbytes, stranded=r.stranded)
        except LaminarError as e: say(**{'error' if do != 'give' else 'given': e.message})

def nursery(path):
    "Loads torch once, and becomes a rank for whoever calls"
    torch.set_num_threads(1), model(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path), door.listen()
        print(json.dumps(dict(ready=True)), flush=True)
        while True:
            line = door.accept()[0]
            if os.fork() == 0: break
            line.close()
    files = line.makefile('r'), line.makefile('w')
    line.close(), print(json.dumps(dict(pid=os.getpid())), file=files[1], flush=True)
    rank_main(files, *json.loads(files[0].readline()))

# ---------------------------------------------------------------- processes

class Speaker:
    "Says JSON, a line at a time"
    def _speak(self, read, write, pid):
        self.read, self.write, self.pid, self.said, self.kept = read, write, pid, queue.Queue(), []
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self):
        with suppress(OSError, json.JSONDecodeError): # killed in the middle of a line
            for line in self.read: self.said.put(json.loads(line))

    def tell(self, said): print(json.dumps(said), file=self.write, flush=True)
    def hear(self, *keys, timeout_s=60):
        "The next thing said that has one of these keys; the others are kept for who asks for them"
        end = time.monotonic() + timeout_s
        while True:
            for said in self.kept:
                if said.keys() & set(keys): return self.kept.remove(said) or said
            self.kept.append(self.said.get(timeout=max(.01, end - time.monotonic())))

class Process(Speaker):
    "A process of ours"
    def __init__(self, *command):
        self.p = subprocess.Popen([sys.executable, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._speak(self.p.stdout, self.p.stdin, self.p.pid)
    def kill(self): self.p.kill(), self.p.wait(5)
    def end(self): self.kill(), self.p.stdin.close(), self.p.stdout.close()

class Rank(Speaker):
    "A child of the nursery"
    def __init__(self, path, *args):
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(path)
        read, write = self.line.makefile('r'), self.line.makefile('w')
        self._speak(read, write, json.loads(read.readline())['pid'])
        self.tell(args)
    def kill(self):
        with suppress(ProcessLookupError): os.kill(self.pid, signal.SIGKILL)
    def end(self): self.kill(), self.line.close()

@pytest.fixture(scope='module')
def cradle():
    with tempfile.TemporaryDirectory(prefix='lw') as d:
        p = Process(__file__, f'{d}/s')
        try: p.hear('ready', timeout_s=60); yield f'{d}/s'
        finally: p.end()

class Hosts:
    "Relays of n hosts, ranks of an actor on the first of them"
    def __init__(self, home, cradle, n, placed, cut='rows', rows={}): # placed: host of each rank; rows: of the embedding, as a wrong rank sees it
        self.home, self.cradle, self.key, self.placed, self.cut, self.started = home, cradle, home/'key', placed, cut, []
        self.key.touch(0o600), self.key.write_bytes(secrets.token_bytes(32))
        self.lives, self.relays = 0, {}
        for h in range(n): self.relay(h)
        self.chain(list(range(n)))
        self.ranks = [self.rank(r, rows.get(r, 1001)) for r in range(len(placed))]

    def _start(self, *command):
        self.started.append(Process(*command))
        return self.started[-1]

    def relay(self, host):
        self.lives += 1
        r = self._start('-m', 'laminar_sdk.weights.relay', '--socket', self.home/f'{host}-{self.lives}', '--name', f'host{host}', '--secret-file', self.key, '--control')
        said = r.hear('address')
        r.address, r.socket = '{}:{}'.format(*said['address']), said['socket']
        self.relays[host] = r

    def chain(self, order):
        "Versions start at the first of these"
        for h, after in zip(order, [*order[1:], None]):
            self.relays[h].tell(dict(peers=[] if after is None else [self.relays[after].address], hops=1, master='' if h == order[0] else self.relays[order[0]].address))

    def rank(self, r, rows=1001):
        self.started.append(Rank(self.cradle, self.relays[self.placed[r]].socket, r, len(self.placed), self.cut, rows))
        return self.started[-1]

    def publish(self, version, *ranks, do='publish'):
        "These ranks, or all, publish at the same time; what they said"
        them = [self.ranks[r] for r in ranks or range(len(self.ranks))]
        for r in them: r.tell([do, version, ''])
        return [r.hear('version', 'half', 'error') for r in them]

    def whole(self, version, *hosts):
        "Wait until a version is on these hosts, or all, and compare it with what it should be"
        for h in hosts or self.relays:
            with RelayClient(self.relays[h].socket) as c:
                try: c.wait_for(version, timeout_s=60)
                except ClusterError as e: raise AssertionError(f'{e.message}; {self.failures()}') from e
                with c.pull(version) as p:
                    p.verify()
                    right = model(version)
                    for name, x in p.views().items(): assert torch.equal(x, right[name]), f'version {version} on host {h}: {name}'
                    del x

    def failures(self):
        "What all relays have said of failures"
        for r in self.relays.values():
            with suppress(queue.Empty):
                while True: r.kept.append(r.said.get_nowait())
        return {h: [s for s in r.kept if 'failure' in s] for h, r in self.relays.items()}

    def newest(self, host):
        with RelayClient(self.relays[host].socket) as c: return max((v.version for v in c.versions()), default=-1)

    def stats(self, host):
        with RelayClient(self.relays[host].socket) as c: return c.stats()

    def failure(self, host, what, timeout_s=40):
        "What a relay says of a failure of this kind"
        while (said := self.relays[host].hear('failure', timeout_s=timeout_s))['failure'] != what: continue
        return said['reason']

@pytest.fixture
def world(cradle):
    "Makes `Hosts` in a short private folder: socket paths end at 107 bytes"
    with tempfile.TemporaryDirectory(prefix='lw') as d:
        made = []
        def make(*args, **kw):
            made.append(Hosts(Path(d), cradle, *args, **kw))
            return made[-1]
        yield make
        for w in made: [p.end() for p in w.started]

# ---------------------------------------------------------------- the rules, in one process

@st.composite
def cut(draw):
    "A layout, and parts that tile it: each tensor is cut along one of its axes, at any places"
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4))
    ranks, dtypes = draw(st.integers(1, 4)), st.sampled_from(['bfloat16', 'float32', 'int8', 'bool', 'float64'])
    layout = Layout.of({f't{i}': (draw(dtypes), s) for i, s in enumerate(shapes)})
    table = [{} for _ in range(ranks)]
    for t in layout.tensors:
        if not t.shape: table[draw(st.integers(0, ranks - 1))][t.name] = ((), ()); continue
        axis = draw(st.integers(0, len(t.shape) - 1))
        ends = [0, *sorted(draw(st.lists(st.integers(0, t.shape[axis]), min_size=ranks - 1, max_size=ranks - 1))), t.shape[axis]]
        for rank in range(ranks):
            start, shape = [0]*len(t.shape), list(t.shape)
            start[axis], shape[axis] = ends[rank], ends[rank + 1] - ends[rank]
            table[rank][t.name] = (start, shape)
    return layout, [Part.of(rank, ranks, boxes) for rank, boxes in enumerate(table)]

@given(cut(), st.randoms(use_true_random=False))
def test_parts_make_the_image(made, rng):
    layout, parts = made
    image, again = bytearray(rng.randbytes(layout.nbytes)), bytearray(layout.nbytes)
    tile(parts, layout)
    for part in rng.sample(parts, len(parts)):
        alone = bytearray(packed(part, layout).nbytes)
        pack(part, layout, image, alone), place(part, layout, alone, again)
    for t in layout.tensors: assert image[t.offset:t.end] == again[t.offset:t.end]
    lost = rng.randrange(len(parts))
    if any(s.elements for s in parts[lost].slices):
        with pytest.raises(LaminarError, match='in no part'): tile(parts[:lost] + parts[lost + 1:], layout)
        with pytest.raises(LaminarError, match='both write'): tile([*parts, parts[lost]], layout)

@settings(max_examples=150)
@given(st.data())
def test_what_shows_is_whole(data):
    "Ranks that write, stop, die, skip versions and come from other hosts in any order: each visible version has its own bytes, of every rank, and memory stays bounded"
    ranks, layout = data.draw(st.integers(1, 3)), Layout.of(dict(w=('int32', (6, 4))))
    parts, shown, gone = [Part.rows(layout, r, ranks) for r in range(ranks)], [], object()
    def look(event):
        if not isinstance(event, tuple): return
        image = g.shelf.store.images[-1]
        shown.append((event[0].version, set(np.frombuffer(image.segment.memory, 'i4', 24).tolist())))
    g = Gathering(Shelf(keep=1, notify=look), patience_s=0)
    owners, at, last = [object() for _ in range(ranks)], {}, [0]*ranks
    for _ in range(data.draw(st.integers(1, 40))):
        rank = data.draw(st.integers(0, ranks - 1))
        act = data.draw(st.sampled_from(['write', 'write', 'write', 'seal', 'seal', 'seal', 'seal', 'die', 'stop', 'enter', 'skip']))
        a = at.get(rank)
        if act == 'skip': last[rank] += 1
        elif a is None and act in ('write', 'seal'):
            if (a := g.join(owners[rank], layout, parts[rank])) is not None: at[rank] = a
        elif a is None and act == 'enter':
            with suppress(LaminarError):
                if (a := g.enter(gone, layout, parts[rank], last[rank] + 1)) is None: continue
                place(parts[rank], layout, np.full(packed(parts[rank], layout).nbytes//4, last[rank] + 1, 'i4'), a.segment.memory)
                g.seal(a, parts[rank], last[rank] + 1, 0, 0, stays=False)
                last[rank] += 1
        elif a is not None and act == 'seal':
            last[rank] += 1
            place(parts[rank], layout, np.full(packed(parts[rank], layout).nbytes//4, last[rank], 'i4'), a.segment.memory)
            del at[rank]
            with suppress(LaminarError): g.seal(a, parts[rank], last[rank], 0, 0)
        elif a is not None and act == 'write': place(parts[rank], layout, np.full(packed(parts[rank], layout).nbytes//4, -7, 'i4'), a.segment.memory)
        elif a is not None and act == 'die':
            del at[rank]
            g.leave(a, parts[rank], owners[rank])
            owners[rank] = object()
        elif a is not None and act == 'stop':
            del at[rank]
            g.abandon(a, parts[rank])
        assert len(g.shelf.pool) <= 2 + ranks # an impatient place: one more image for each rank that is stuck in an old one
    assert all(values == {version} for version, values in shown), shown
    assert [v for v, _ in shown] == sorted({v for v, _ in shown})
    for rank, a in at.items(): g.leave(a, parts[rank], owners[rank])
    assert len(g.shelf.pool.used) <= 1 + (g.now is not None)

# ---------------------------------------------------------------- ranks on one host

@pytest.mark.parametrize('cut', CUTS)
def test_two_ranks_write_one_image(world, cut):
    w = world(1, [0, 0], cut)
    said = [w.publish(v) for v in range(12)]
    w.whole(11), w.whole(10)
    assert sum(r['nbytes'] for r in said[0]) < LAYOUT.nbytes + 1000 # nobody wrote all of it
    assert w.stats(0)['segments_made'] == 3 and w.stats(0)['failures'] == {} # keep + 1, as with one rank
    w.publish(12, 0) # rank 1 is behind
    time.sleep(.3)
    assert w.newest(0) == 11
    w.publish(12, 1), w.whole(12)

def test_a_rank_is_killed_in_the_middle_of_its_copy(world):
    w = world(1, [0, 0, 0, 0])
    w.publish(0), w.whole(0)
    w.publish(1, 2, do='half'), w.publish(1, 0, 1, 3)
    w.ranks[2].kill()
    assert w.failure(0, 'gather') == 'rank 2 of 4 is gone' and w.newest(0) == 0
    assert {r['error'] for r in w.publish(2, 0, 1, 3)} == {'version 1 is not published: rank 2 of 4 is gone'}
    w.ranks[2] = w.rank(2)
    for v in (3, 4, 5): assert all('version' in r for r in w.publish(v))
    w.whole(5)
    assert w.stats(0)['segments'] <= 3

def test_a_rank_with_a_wrong_shape(world):
    w = world(1, [0, 0], rows={1: 1000})
    w.publish(0, 0)
    wrong, = w.publish(0, 1)
    assert wrong['error'] == "rank 1 publishes another image: tensor 'embed' is ('bfloat16', (1000, 512)), the others have ('bfloat16', (1001, 512))"
    assert w.newest(0) == -1
    w.ranks[1].kill()
    w.ranks[1] = w.rank(1)
    w.publish(0, 1), w.whole(0)

# ---------------------------------------------------------------- ranks on two hosts

@pytest.mark.parametrize('cut', CUTS)
def test_four_ranks_on_two_hosts(world, cut, figures):
    w = world(3, [0, 0, 1, 1], cut)
    for v in range(10): assert all(not r['stranded'] for r in w.publish(v))
    w.whole(9)
    assert w.publish(10, 0, 1, 2) and time.sleep(.3) is None
    assert [w.newest(h) for h in range(3)] == [9]*3 # rank 3 is behind
    w.publish(10, 3), w.whole(10)
    figures |= {f'host{h}': {k: w.stats(h)[k] for k in ('came_in', 'segments', 'failures')} for h in range(3)}
    assert all(w.stats(h)['failures'] == {} for h in range(3))

def test_a_rank_of_the_other_host_is_killed(world):
    w = world(2, [0, 0, 1, 1])
    w.publish(0), w.whole(0)
    w.publish(1, 3, do='half'), w.publish(1, 0, 1, 2)
    w.ranks[3].kill()
    w.ranks[3] = w.rank(3)
    time.sleep(.3)
    assert [w.newest(h) for h in range(2)] == [0, 0]
    w.publish(2, 3) # it goes on with the next version: 1 will never be whole
    assert w.failure(0, 'gather') == 'rank 3 went on to version 2'
    w.publish(2, 2)
    said = w.publish(2, 0, 1)
    if 'error' in said[0]: said = w.publish(2, 0, 1) # they hear of version 1, and write 2 again
    w.whole(2)

def test_the_master_dies_and_another_one_gathers(world):
    "What the ranks wrote is in their memory, and comes together elsewhere: nothing is published anew"
    w = world(3, [0, 0, 1, 1])
    for v in range(3): w.publish(v)
    w.whole(2)
    w.publish(3, 0, 1, 2)
    w.relays[0].kill()
    w.chain([1, 2])
    w.publish(3, 3)
    time.sleep(.3)
    assert w.newest(1) == w.newest(2) == 2
    w.relay(0)
    w.chain([1, 2, 0])
    for r in (0, 1):
        w.ranks[r].tell(['give', 3, w.relays[0].socket])
        assert w.ranks[r].hear('given')['given'] in (-1, 2) # what that relay has by then
    w.whole(3)
    for v in (4, 5): assert all('version' in r for r in w.publish(v))
    w.whole(5)

# ---------------------------------------------------------------- anything may happen

def storm(w, rng, rounds):
    "Ranks and relays are killed at any moment, one a round; what can be read is always whole, and when it is over, versions come again. How many came about"
    version, came = 0, 0
    for _ in range(rounds):
        victim, when = rng.choice(['rank', 'rank', 'relay', 'nobody']), rng.choice(['half', 'before', 'between', 'after'])
        r, h = rng.randrange(len(w.ranks)), rng.randrange(len(w.relays))
        def strike():
            if victim == 'rank':
                w.ranks[r].kill()
                w.ranks[r] = w.rank(r)
            elif victim == 'relay':
                w.relays[h].kill()
                w.chain(others := [x for x in w.relays if x != h])
                w.relay(h)
                w.chain([*others, h])
                for i, rank in enumerate(w.ranks):
                    if w.placed[i] == h: rank.tell(['give', version, w.relays[h].socket])
        order = rng.sample(range(len(w.ranks)), len(w.ranks))
        if when == 'half' and victim == 'rank': w.ranks[r].tell(['half', version, '']), time.sleep(.1)
        if when in ('half', 'before'): strike()
        asked = []
        for n, i in enumerate(order): # at once: a rank may have to wait for the others' part of the version before
            if n == 2 and when == 'between': strike()
            w.ranks[i].tell(['publish', version, ''])
            asked.append(w.ranks[i])
        for rank in asked: rank in w.ranks and rank.hear('version', 'error')
        if when == 'after': strike()
        time.sleep(rng.uniform(0, .2))
        version += 1
        came += look(w, version)
    for _ in range(4): w.publish(version); version += 1 # each hears what became of the last, and goes on
    assert all('version' in said for said in w.publish(version))
    w.whole(version)
    return came

def look(w, version):
    "Compare everything that can be read on any host; whether the newest version is there"
    found = []
    for relay in w.relays.values():
        with RelayClient(relay.socket) as c:
            for there in c.versions():
                found.append(there.version)
                with suppress(MissingError), c.pull(there.version) as p: # it may just have gone
                    right = model(there.version)
                    for name, x in p.views().items(): assert torch.equal(x, right[name]), f'version {there.version}: {name}'
                    del x
    return version - 1 in found

def test_ranks_and_relays_are_killed(world, figures):
    figures['came_about'] = [storm(world(2, [0, 0, 1, 1], 'columns'), random.Random(3), 6), 6]

@pytest.mark.long
@pytest.mark.parametrize('seed', range(3))
def test_ranks_and_relays_are_killed_forty_times(world, seed, figures):
    figures['came_about'] = [storm(world(2, [0, 0, 1, 1], ['rows', 'columns'][seed % 2]), random.Random(seed), 40), 40]

if __name__ == '__main__': nursery(sys.argv[1])
