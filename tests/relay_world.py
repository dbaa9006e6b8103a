"""Relays of several hosts as real processes, an actor as one, wires that can be slow, dead or lying, and whoever carries out what the
membership core says (as `laminar_sdk.tier` does in a run)"""
import itertools, json, queue, random, secrets, signal, socket, struct, subprocess, sys, threading, time
from contextlib import suppress
from pathlib import Path

import xxhash

from laminar_sdk.core import events as ev
from laminar_sdk.scheduling import membership as ms

MB = 1_000_000
ACTOR = 0 # the host of the actor

# ---------------------------------------------------------------- wires

class Wire:
    "A proxy before one relay: everybody reaches it through here"
    def __init__(self, rate=None): # bytes a second of all that goes in; None: as fast as it can
        self.door = socket.socket()
        self.door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 << 10) # else the kernel takes in megabytes at once
        self.door.bind(('127.0.0.1', 0)), self.door.listen(64)
        self.address, self.target, self.rate, self.free, self.back = self.door.getsockname(), None, rate, 0., None # back: bytes a second of what comes out
        self.gave = 0 # bytes that came out
        self.moving, self.cut, self.flip, self.record, self.ends, self.lock = threading.Event(), False, None, None, set(), threading.Lock()
        self.flipped = 0
        self.moving.set()
        self._go(self._accept)

    def _go(self, work, *args): threading.Thread(target=work, args=args, daemon=True).start()
    def freeze(self): self.moving.clear() # nothing passes, nothing is closed: as if the host had vanished
    def heal(self): self.cut = False; self.moving.set()
    def sever(self):
        "Every connection is reset, no new one comes through"
        self.cut = True
        for s in list(self.ends): self._shut(s)

    def _accept(self):
        while True:
            try: a = self.door.accept()[0]
            except OSError: return
            self._go(self._serve, a)

    def _serve(self, a):
        self.moving.wait()
        b = None
        with suppress(OSError):
            if not self.cut and self.target: b = socket.create_connection(self.target, 2)
        if b is None: return self._shut(a)
        b.settimeout(None)
        self.ends |= {a, b}
        self._go(self._pump, b, a, False), self._pump(a, b, True)

    def _pump(self, source, sink, inwards):
        watch = Payload(self) if inwards else None
        with suppress(OSError): # an end that is gone is the other's end
            while data := source.recv(1 << 16):
                self.moving.wait()
                if inwards: data = watch(data); self._wait(len(data))
                else:
                    self.gave += len(data)
                    if self.back: time.sleep(len(data)/self.back)
                sink.sendall(data)
        self._shut(source), self._shut(sink)

    def _wait(self, n):
        if not self.rate: return
        with self.lock:
            self.free = max(time.monotonic(), self.free) + n/self.rate
            left = self.free - time.monotonic()
        if left > 0: time.sleep(left)

    def _shut(self, s):
        self.ends.discard(s)
        with suppress(OSError): s.shutdown(socket.SHUT_RDWR)
        s.close()

    def close(self):
        self.cut = True
        self._shut(self.door), self.heal(), self.sever()

class Payload:
    "Finds, in what a sender says, where the bytes of the image begin; flips one of them, or records all, if the wire is told to"
    def __init__(self, wire): self.wire, self.seen, self.at, self.starts = wire, bytearray(), 0, None

    def __call__(self, data):
        if self.wire.record is not None: self.wire.record += data
        if self.starts is None:
            self.seen += data
            if len(self.seen) >= 68: self.starts = 68 + struct.unpack('<I', self.seen[64:68])[0] + 32 # nonce and proof; length, offer, signature
        flip, begins = self.wire.flip, self.at
        self.at += len(data)
        if flip is None or self.starts is None or not begins <= self.starts + flip < self.at: return data
        self.wire.flip, self.wire.flipped, data = None, self.wire.flipped + 1, bytearray(data)
        data[self.starts + flip - begins] ^= 1 << 3
        return bytes(data)

# ---------------------------------------------------------------- processes

class Speaker:
    "A process that says JSON, a line at a time, into an inbox; None when it has ended"
    def __init__(self, inbox, *command):
        self.p = subprocess.Popen([sys.executable, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.inbox = inbox
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self):
        for line in self.p.stdout:
            with suppress(json.JSONDecodeError): self.inbox.put((self, json.loads(line))) # killed in the middle of a line
        self.inbox.put((self, None))

    def tell(self, **said):
        with suppress(BrokenPipeError): print(json.dumps(said), file=self.p.stdin, flush=True) # dead, which we are about to hear

    def end(self):
        if self.p.poll() is None: self.p.kill()
        self.p.wait(5)
        with suppress(BrokenPipeError): self.p.stdin.close()

class Life(Speaker):
    "One life of a host's relay"
    def __init__(self, world, host, born):
        self.host, self.born, self.socket, self.address, self.newest, self.failures, self.errors = host, born, world.home/f'{host}-{born}', None, -1, [], []
        self.deaf = False # its heartbeats do not come through
        super().__init__(world.inbox, '-m', 'laminar_sdk.weights.relay', '--socket', self.socket, '--name', f'host{host}', '--secret-file', world.key, '--control',
                         '--keyframe-every', world.keyframe_every, *world.args.get(host, ()))

class World:
    "The relays of n hosts, and the actor on the first"
    def __init__(self, home: Path, n: int, mb: int = 8, rate=None, keyframe_every=50, args={}, core=None):
        self.home, self.mb, self.key, self.args, self.keyframe_every, self.inbox = home, mb, home/'key', args, keyframe_every, queue.Queue()
        home.mkdir(mode=0o700, exist_ok=True)
        self.secret = secrets.token_bytes(32)
        self.key.touch(0o600), self.key.write_bytes(self.secret)
        self.core, self.began, self.ticked, self.born = core or ms.Membership(silent_s=2., dead_s=30., progress_s=2.), time.monotonic(), 0., itertools.count(1)
        self.wires, self.lives, self.dead, self.did, self.restarts = [Wire(rate) for _ in range(n)], {}, [], [], True
        self.reports, self.published, self.digests, self.refused, self.numbers, self.wrong = [], [], {}, [], itertools.count(), []
        self.actor = Speaker(self.inbox, __file__, mb)
        self.ready = False
        for host in range(n): self._live(host)

    def __enter__(self):
        self.until(lambda: self.ready and all(life.address for life in self.lives.values()), 90)
        return self

    def __exit__(self, *_):
        self.restarts = False
        for s in (self.actor, *self.lives.values(), *self.dead): s.end()
        for w in self.wires: w.close()

    def _live(self, host): self.lives[host] = Life(self, host, next(self.born))

    # ------------------------------------------------ what comes in

    def pump(self, seconds=0.):
        "Take in what is said, for so long"
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            with suppress(queue.Empty):
                who, said = self.inbox.get(timeout=min(.05, left)) if left > 0 else self.inbox.get_nowait()
                self._hear(who, said)
                continue
            if time.monotonic() - self.ticked > .25:
                self.ticked = time.monotonic()
                self.feed(ev.RelayTick)
            if left <= 0: return

    def until(self, condition, timeout_s, why=''):
        "Take in what is said, until a condition holds; the seconds it took"
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, f'{why} not within {timeout_s} s: {self}'
            self.pump(.02)
        return time.monotonic() - began

    def __repr__(self): return (f'{self.core!r}, published {self.published[-3:]}, newest {[(h, life.newest, life.failures[-2:], life.errors) for h, life in self.lives.items()]}, '
                                f'did {self.did[-8:]}, links failed {[*self.core.failed]}')

    def _hear(self, who, said):
        if who is self.actor: return self._actor(said)
        if who.host in self.lives and self.lives[who.host] is who: self._relay(who, said)

    def _relay(self, life, said):
        match said:
            case None: self._ended(life)
            case {'address': address}:
                life.address, self.wires[life.host].target = tuple(address), tuple(address)
                self.feed(ev.RelayJoined, life.host, life.born, self.wires[life.host].address, life.host == ACTOR)
            case {'newest': newest, 'arriving': arriving, 'received': received}:
                if newest < life.newest: self.wrong.append(f'host {life.host} went from {life.newest} back to {newest}')
                if not life.deaf: self.feed(ev.RelayHeard, life.host, life.born, newest, arriving, received)
            case {'version': version, 'checksum': _}:
                if version <= life.newest: self.wrong.append(f'host {life.host} shows {version} after {life.newest}')
                life.newest = version
            case {'failure': 'link', 'peer': peer, 'reason': reason}: self._link(life.host, peer, reason)
            case {'failure': what}: life.failures.append((what, said['version'], said['reason']))
            case {'error': error}: life.errors.append(error)

    def _link(self, host, address, reason):
        peer = next((h for h, wire in enumerate(self.wires) if '{}:{}'.format(*wire.address) == address), None)
        self.feed(ev.LinkFailed, host, peer, reason)

    def _ended(self, life):
        life.end()
        self.dead.append(life)
        self.feed(ev.RelayGone, life.host, life.born, 'its process has ended')
        if self.restarts: self._live(life.host)

    def _actor(self, said):
        match said:
            case None: self.wrong.append('the actor has died') if self.restarts else None
            case {'ready': _}: self.ready = True
            case {'version': version, 'digest': digest}:
                self.published.append(version)
                self.digests[version] = digest
                self.reports.append(said)
                self.feed(ev.VersionSealed, version, ACTOR)
            case {'version': version, 'error': error}: self.refused.append((version, error))
            case {'given': given, 'error': error}:
                if not given: self.feed(ev.SealGone, ACTOR, error)

    # ------------------------------------------------ what is to be done

    def feed(self, kind, *args):
        for command in self.core.on(kind(time.monotonic() - self.began, *args)):
            self.did.append(command)
            getattr(self, f'_do_{type(command).__name__}', lambda c: None)(command)
        self.wrong += self.core.check()

    def _do_SetNext(self, c):
        order = self.core.order
        hops = len(order) - 1 - order.index(c.host) if c.host in order else 1
        self.lives[c.host].tell(peers=[] if c.peer is None else ['{}:{}'.format(*c.peer)], hops=hops)

    def _do_Adopt(self, c): self.actor.tell(do='give', socket=str(self.lives[c.host].socket))
    def _do_AskActorToPush(self, c): self.publish('same')
    def _do_Cut(self, c): self.lives[c.host].p.kill()

    # ------------------------------------------------ what tests do

    def publish(self, form): # "full", "delta", "same"; returns at once
        "The actor publishes its next version"
        version = next(self.numbers)
        self.actor.tell(do='publish', version=version, form=form, socket=str(self.lives[ACTOR].socket))
        return version

    def answered(self, version): return version in self.digests or any(v == version for v, _ in self.refused)

    def launch(self, form):
        "Publish a version, and let it get half-way"
        version = self.publish(form)
        self.until(lambda: self.answered(version), 30)
        self.pump(.04)

    def deliver(self, form, *hosts, timeout_s=20.):
        "Publish, and wait until these, or all, have it; the seconds it took"
        version = self.publish(form)
        return self.until(lambda: version in self.digests and all(self.lives[h].newest >= version for h in hosts or self.lives), timeout_s, f'version {version}')

    def have(self, *hosts): # a condition
        "These, or all, have what was published last"
        return lambda: bool(self.published) and all(self.lives[h].newest >= self.published[-1] for h in hosts or self.lives)

    def settled(self): # a condition
        "The chain is as it will stay"
        return self.core.quiet() and not self.core.unsorted and len(self.core.order) == len(self.wires) and self.core.order[0] == ACTOR

    def same(self, *hosts):
        "The newest version of these, or of all, is to the last bit what the actor published"
        from laminar_sdk.weights.client import RelayClient
        version = self.published[-1]
        for h in hosts or self.lives:
            with RelayClient(self.lives[h].socket) as client, client.pull(version) as pulled:
                pulled.verify()
                assert self.digest(pulled) == self.digests[version], f'version {version} on host {h} is another one'
        assert not self.wrong, self.wrong

    def digest(self, pulled): return xxhash.xxh3_64_hexdigest(pulled.buffer)

    def stats(self, host):
        from laminar_sdk.weights.client import RelayClient
        with RelayClient(self.lives[host].socket) as client: return client.stats()

    def kill(self, host, sig=signal.SIGKILL): self.lives[host].p.send_signal(sig)

# ---------------------------------------------------------------- the actor

class Actor:
    "Publishes drifting weights"
    def __init__(self, mb):
        import gc, mmap, torch
        from laminar_sdk.weights.layout import Layout, views
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.named = {f'layer{i}': torch.randn(500, 1000).bfloat16() for i in range(int(mb))} # a million bytes each
        self.client = None
        layout = Layout.of(self.named)
        self.plain = views(mmap.mmap(-1, layout.nbytes), layout) # warm memory of our own
        self.copy(), gc.collect(), gc.freeze() # torch's objects: no collection of them falls into a publish

    def copy(self):
        "One plain copy of what is published: how long it takes, here and now"
        from laminar_sdk.weights.writer import copy_into
        began, cpu = time.perf_counter(), time.thread_time()
        copy_into(self.plain, self.named)
        return time.perf_counter() - began, time.thread_time() - cpu

    def change(self, form):
        import torch
        for x in self.named.values() if form != 'same' else ():
            bits = x.view(torch.int16).view(-1)
            if form == 'full': bits.random_(-2**15, 2**15)
            else: bits[torch.randint(len(bits), (len(bits)//100,))] += 1

    def publish(self, version, form, socket):
        import torch
        from laminar_sdk.core.errors import ClusterError
        from laminar_sdk.weights.client import RelayClient
        self.change(form)
        plain = self.copy()
        began = time.perf_counter()
        if self.client is None: self.client = RelayClient(socket)
        try: report = self.client.publish(version, self.named)
        except ClusterError as e: return dict(version=version, error=str(e))
        stall, whole = time.perf_counter() - began, xxhash.xxh3_64()
        for x in self.named.values(): whole.update(x.view(torch.uint8).numpy())
        return dict(version=version, stall_s=stall, digest=whole.hexdigest(), copy_s=report.copy_s, cpu_s=report.cpu_s, wait_s=report.wait_s,
                    stranded=report.stranded, plain=[plain, self.copy()])

    def give(self, socket):
        from laminar_sdk.core.errors import ConfigError, LaminarError
        from laminar_sdk.weights.client import RelayClient
        sealed = self.client and self.client.writer.sealed
        if self.client and self.client.path != socket: # from now on through that relay
            old, self.client = self.client, RelayClient(socket)
            self.client.follow(old)
            if self.client.writer.ahead: self.client.writer.ahead.result(10) # a real actor computes meanwhile
        if sealed is None: return dict(given=False, error='nothing has been published')
        try: sealed.hand_to(socket)
        except ConfigError as e: return dict(given=True, error=str(e)) # it has it, or a newer one
        except LaminarError as e: return dict(given=False, error=str(e))
        return dict(given=True, error='')

# ---------------------------------------------------------------- a reader

def reader(path, last, seed):
    "A process that pulls at random and holds some for long"
    return subprocess.Popen([sys.executable, __file__, 'read', str(path), str(last), str(seed)], stdout=subprocess.PIPE, text=True)

def read(path, last, seed):
    "Sums each version when it comes and when it goes; prints what it saw"
    from laminar_sdk.core.errors import IntegrityError
    from laminar_sdk.weights.client import RelayClient
    rng, held, torn, read, longest = random.Random(int(seed)), [], 0, 0, 0
    with RelayClient(path) as client:
        while not held or held[-1].version < int(last):
            held.append(client.pull())
            read += 1
            time.sleep(rng.random() * .05)
            while len(held) > 4 or held[-1].version >= int(last) and len(held) > 1:
                p = held.pop(rng.randrange(len(held) - 1))
                longest = max(longest, held[-1].version - p.version)
                try: p.verify()
                except IntegrityError: torn += 1
                p.release()
    print(json.dumps(dict(read=read, torn=torn, held_for=longest)), flush=True)

# ---------------------------------------------------------------- a rollout whose relay is away

def borrow(version, key, *neighbours):
    "Pulls a version from the first of these neighbours that can lend it; prints what it got and what each try cost"
    from laminar_sdk.core.errors import LaminarError
    from laminar_sdk.weights.client import RelayClient
    from laminar_sdk.weights.neighbour import near
    tries = []
    for where in neighbours:
        began = time.monotonic()
        try:
            with near(where, int(version), Path(key).read_bytes()) as path, RelayClient(path) as client, client.pull(int(version)) as pulled:
                pulled.verify()
                digest = xxhash.xxh3_64_hexdigest(pulled.buffer)
            return print(json.dumps(dict(digest=digest, tries=[*tries, time.monotonic() - began], left=Path(path).exists())), flush=True)
        except (LaminarError, OSError) as e: tries.append([time.monotonic() - began, str(e)])
    print(json.dumps(dict(tries=tries)), flush=True)

def main(mb):
    actor = Actor(mb)
    print(json.dumps(dict(ready=True)), flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        print(json.dumps(getattr(actor, said.pop('do'))(**said)), flush=True)

if __name__ == '__main__': dict(read=read, borrow=borrow)[sys.argv[1]](*sys.argv[2:]) if len(sys.argv) > 2 else main(sys.argv[1])
