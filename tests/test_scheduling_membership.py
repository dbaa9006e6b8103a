"The membership core under any order of joins, losses, silences and publishes, with relays that pass versions on as they are told"
from itertools import pairwise, permutations
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from laminar_sdk.scheduling import membership as mb

SIZE = 3 # chunks of an image; a link carries one a second


class Relay:
    "A relay process: what it holds, what is arriving and from whom, where it passes things on to"

    def __init__(self, host, life):
        self.host, self.life, self.address = host, life, (f'host{host}', life)
        self.newest, self.got, self.source, self.next = -1, (-1, SIZE), None, None
        self.stopped, self.clumsy, self.sealing, self.waiting, self.told_of = False, False, None, [], set()

    def take(self, version):
        if version > self.newest: self.newest, self.got, self.source = version, (version, SIZE), None


class World:
    "Hosts with relays and an actor; everything that happens is told the core later, in order"

    def __init__(self, hosts, actor_hosts=(0,), labels={}):
        self.hosts, self.actor_hosts, self.labels = hosts, actor_hosts, labels
        self.core, self.t, self.log, self.mail = mb.Membership(), 0., [], []
        self.relays, self.lives, self.cut, self.loud, self.issued = {}, dict.fromkeys(range(hosts), -1), set(), True, -1
        self.actor, self.asked, self.revive = None, None, False # actor: (host, version that it has mapped)
        self.known, self.nexts, self.said = {}, {}, {} # by host, as far as the core was told: life, next, version
        self.size = SIZE

    # what the core is told, and what it says
    def tell(self, cls, *args): self.mail.append((cls, args))

    def deliver(self, n=None):
        todo, self.mail = self.mail[:n], self.mail[len(self.mail) if n is None else n:]
        for cls, args in todo: self.feed(cls(self.t, *args))

    def feed(self, e):
        order, failed = list(self.core.order), dict(self.core.failed)
        self.learn(e)
        commands = self.core.on(e)
        assert self.core.check() == [], e
        takes = [c.peer is not None for c in commands if isinstance(c, mb.SetNext)]
        assert takes == sorted(takes), 'who lets go comes before who takes'
        for c in commands: self.carry_out(c)
        self.log.append((e, commands))
        assert {h: self.nexts[h] for h in self.known} == self.core.nexts()
        if not self.core.quiet() and self.core.failed == failed and not isinstance(e, mb.LinkFailed): self.nobody_moved(order, e)

    def nobody_moved(self, before, e):
        "Who was there stands where he stood, who is new at the tail; or the chain was turned, and had to be"
        order, holds = self.core.order, self.core.holds
        new = [h for h in order if h not in before or isinstance(e, mb.RelayJoined) and h == e.host]
        kept = [h for h in before if h in order and h not in new] + new
        if order == kept: return
        assert any(kept[i:] + kept[:i] == order for i in range(len(kept))), (before, order)
        assert before[:1] != kept[:1] or holds(order[0]) and not holds(before[0])

    def learn(self, e):
        if isinstance(e, mb.RelayJoined): self.known[e.host], self.said[e.host] = e.incarnation, e.newest
        elif isinstance(e, mb.RelayGone) and self.known.get(e.host) == e.incarnation: self.known.pop(e.host)
        elif isinstance(e, mb.RelayHeard) and self.known.get(e.host) == e.incarnation: self.said[e.host] = e.newest

    def carry_out(self, c):
        assert c.host in self.known, f'{c} names a dead host'
        r = self.relays.get(c.host)
        if isinstance(c, mb.SetNext):
            if c.peer is not None: assert c.peer in {(f'host{h}', life) for h, life in self.known.items()} and c.peer[0] != f'host{c.host}'
            self.nexts[c.host] = c.peer
        elif isinstance(c, mb.Cut):
            self.known.pop(c.host)
            if r and r.life == self.core.lives[c.host]: self.die(c.host)
        elif isinstance(c, mb.AskActorToPush):
            assert c.host in self.actor_hosts and not any(self.said[h] >= self.core.newest for h in self.known)
            self.asked = c.host
        elif isinstance(c, mb.Promote): assert c.host == self.core.order[0]
        if r and r.life == self.known.get(c.host):
            r.waiting.append(c)
            if not r.stopped: self.obey(r)

    def obey(self, r):
        for c in r.waiting:
            if isinstance(c, mb.SetNext): r.next, r.told_of = c.peer, set()
            elif isinstance(c, mb.Adopt) and not r.clumsy:
                if self.actor == (r.host, c.version): r.take(c.version)
                elif self.actor is None or self.actor[0] != r.host: self.tell(mb.SealGone, r.host)
        r.waiting = []

    # what happens
    def be_born(self, host):
        self.lives[host] += 1
        self.relays[host] = r = Relay(host, self.lives[host])
        self.tell(mb.RelayJoined, host, r.life, r.address, host in self.actor_hosts, *self.labels.get(host, ('', '')), r.newest)

    def die(self, host):
        self.tell(mb.RelayGone, host, self.relays.pop(host).life, 'killed')

    def publish(self, host):
        "The actor there seals a version; whether its relay lives long enough to read this is another matter"
        r = self.relays.get(host)
        if r is None: return
        if self.actor and self.actor[0] != host: self.actor_dies()
        self.issued += 1
        r.sealing, self.actor = self.issued, (host, self.issued)
        self.tell(mb.VersionSealed, self.issued, host)

    def actor_dies(self):
        if self.actor: self.tell(mb.SealGone, self.actor[0], 'killed')
        self.actor = None

    def resume(self, r):
        r.stopped = False
        self.obey(r)

    def second(self):
        "One second of everything"
        self.t += 1
        if self.revive:
            for h in range(self.hosts):
                if h not in self.relays: self.be_born(h)
            if self.actor is None and self.actor_hosts[0] in self.relays: self.publish(self.actor_hosts[0])
        if self.asked is not None: self.asked = self.publish(self.asked)
        self.deliver()
        awake = [r for r in self.relays.values() if not r.stopped]
        for r in awake:
            if r.sealing is not None: r.sealing = r.take(r.sealing)
        self.move(awake)
        for r in awake: self.tell(mb.RelayHeard, r.host, r.life, r.newest, *(r.got if r.got[0] > r.newest else ()))
        self.deliver()
        self.feed(mb.RelayTick(self.t))

    def move(self, awake):
        at, before = {r.address: r for r in self.relays.values()}, {r.address: r.got for r in awake}
        for r in awake: # what arrived from somebody who is gone, or sends elsewhere now, is dropped
            if r.source and (r.source not in at or at[r.source].next != r.address): r.got, r.source = (r.newest, SIZE), None
        for r in awake:
            if r.next is None: continue
            peer = at.get(r.next)
            if peer is None or (r.host, peer.host) in self.cut: self.complain(r, peer)
            elif not peer.stopped and peer.source in (None, r.address): self.push(r, before[r.address], peer)

    def complain(self, r, peer):
        host = int(r.next[0][4:])
        if r.next not in r.told_of and (peer is None or self.loud): self.tell(mb.LinkFailed, r.host, host, 'no answer')
        r.told_of.add(r.next)

    def push(self, r, had, peer):
        version = peer.got[0] if peer.got[0] > peer.newest else had[0]
        there = had[1] if had[0] == version and had[0] > r.newest else self.size if r.newest >= version else 0
        if version <= peer.newest or not there: return
        done = peer.got[1] if peer.got[0] == version else 0
        peer.source, peer.got = r.address, (version, min(there, done + 1))
        if peer.got[1] == self.size: peer.take(version)

    # the end
    def commands(self, *kinds): return [c for _, commands in self.log for c in commands if isinstance(c, kinds)]

    def done(self, but=()):
        "Whether every survivor has the newest version, and is in the chain"
        return not self.mail and sorted(self.core.order) == sorted(self.relays if not self.revive else range(self.hosts)) and \
            all(r.newest == self.core.newest for h, r in self.relays.items() if h not in but)

    def calm_down(self, seconds=200, but=()):
        for _ in range(seconds):
            if self.done(but): break
            self.second()
        assert self.done(but), (self.core, {h: (r.newest, r.got, r.next) for h, r in self.relays.items()}, self.actor, self.issued)
        return self


def begin(hosts, version=0, **kw):
    "A world in which everybody is there and has the first version"
    w = World(hosts, **kw)
    for h in range(hosts): w.be_born(h)
    w.publish(0)
    w.calm_down()
    assert w.core.newest == 0 and w.core.master == 0
    return w


# ---- any order of events -------------------------------------------------------------------------------------------

class MembershipMachine(RuleBasedStateMachine):
    "Faults at any moment; after the last, every survivor has the newest version within bounded time"

    @initialize(hosts=st.integers(1, 5), actors=st.integers(1, 2), racks=st.lists(st.sampled_from('ab '), min_size=5, max_size=5),
                loud=st.booleans(), together=st.booleans())
    def begin(self, hosts, actors, racks, loud, together):
        self.w = World(hosts, tuple(range(min(actors, hosts))), {h: (r.strip() and 'z', r.strip()) for h, r in enumerate(racks)})
        self.w.loud = loud
        if together:
            for h in range(hosts): self.w.be_born(h)
            self.w.publish(0)

    def host(self, data): return data.draw(st.integers(0, self.w.hosts - 1))
    def pick(self, data): return data.draw(st.sampled_from(sorted(self.w.relays))) if self.w.relays else None

    @rule(n=st.integers(1, 8))
    def time_passes(self, n):
        for _ in range(n): self.w.second()

    @rule(n=st.integers(1, 3))
    def some_is_told(self, n): self.w.deliver(n)

    @rule(seconds=st.sampled_from([3., 20., 100.]))
    def coordinator_sleeps(self, seconds):
        before = len(self.w.commands(mb.Suspect, mb.Cut))
        self.w.t += seconds
        self.w.feed(mb.RelayTick(self.w.t))
        if seconds > 5: assert len(self.w.commands(mb.Suspect, mb.Cut)) == before

    @rule(data=st.data())
    def publish(self, data): self.w.publish(self.w.actor[0] if self.w.actor else data.draw(st.sampled_from(self.w.actor_hosts)))

    @rule(data=st.data())
    def be_born(self, data):
        if (h := self.host(data)) not in self.w.relays: self.w.be_born(h)

    @rule(data=st.data())
    def die(self, data):
        if (h := self.pick(data)) is not None: self.w.die(h)

    @rule(data=st.data())
    def stop(self, data):
        if (h := self.pick(data)) is not None: self.w.relays[h].stopped = True

    @rule(data=st.data())
    def resume(self, data):
        if (h := self.pick(data)) is not None: self.w.resume(self.w.relays[h])

    @rule()
    def actor_dies(self): self.w.actor_dies()

    @rule()
    def actor_dies_with_its_host(self):
        if self.w.actor is None: return
        host = self.w.actor[0]
        if host in self.w.relays: self.w.die(host)
        self.w.actor_dies()

    @rule(data=st.data())
    def cut(self, data): self.w.cut.add((self.host(data), self.host(data)))

    @rule()
    def heal(self): self.w.cut.clear()

    @rule(data=st.data())
    def false_alarm(self, data): self.w.tell(mb.LinkFailed, self.host(data), self.host(data), 'it was nothing')

    @rule()
    def coordinator_is_born_again(self):
        w = self.w
        w.core, w.mail, w.log, w.known, w.nexts, w.asked = mb.Membership(), [], [], {}, {}, None
        for r in list(w.relays.values()): w.feed(mb.RelayJoined(w.t, r.host, r.life, r.address, r.host in w.actor_hosts, *w.labels[r.host], r.newest))
        if w.actor: w.tell(mb.VersionSealed, w.actor[1], w.actor[0])

    @rule(revive=st.booleans())
    def calm(self, revive):
        "The last fault was the last: what is alive has the newest version; unless nobody is left who has it or could be given it"
        w = self.w
        w.cut.clear()
        w.revive = revive
        for _ in range(45): w.second() # who was stopped is cut by now
        assert not any(r.stopped for r in w.relays.values())
        if any(r.newest >= w.core.newest for r in w.relays.values()) or any(h in w.relays for h in (w.actor and w.actor[:1] or w.actor_hosts)): w.calm_down()
        w.revive = False

    def teardown(self):
        if not hasattr(self, 'w'): return
        self.calm(True)
        again = mb.Membership()
        for e, commands in self.w.log: assert again.on(e) == commands


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


# ---- one fault at a time -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('victim', range(5))
@pytest.mark.parametrize('after', range(1, 8))
def test_a_death_during_a_broadcast(victim, after):
    w = begin(5)
    w.publish(0)
    for _ in range(after): w.second()
    start = len(w.commands(mb.SetNext))
    w.die(victim)
    w.deliver()
    links = w.commands(mb.SetNext)[start:]
    assert len(links) == (0 < victim) # the head has nobody before it; whoever else dies, one relay gets another next
    before = w.t
    has_it = [h for h, r in w.relays.items() if r.newest == 1]
    if victim or has_it: assert w.calm_down().core.newest == 1 and w.t - before <= SIZE + 6
    w.revive = True
    w.calm_down()
    assert w.core.newest == 1 and w.issued == 1, 'nobody had to publish again: the memory outlived the relay'
    assert w.core.order[0] == 0 == w.core.master


def test_the_host_of_the_actor_is_gone():
    w = begin(4, actor_hosts=(0, 2))
    w.publish(0)
    w.deliver()
    w.die(0), w.actor_dies() # before the relay has read a word of version 1
    w.calm_down()
    assert w.actor == (2, 2) and w.core.newest == 2 and w.core.order == [2, 3, 1]
    assert w.commands(mb.AskActorToPush) == [mb.AskActorToPush(2)] and w.commands(mb.Adopt) == []


def test_an_actors_host_is_promoted_first():
    w = begin(4, actor_hosts=(0, 2))
    w.publish(0)
    w.deliver()
    w.die(0), w.deliver()
    assert w.core.order == [2, 3, 1] and w.core.master == 2 # nobody has version 1, so anybody could be the head
    w = begin(4, actor_hosts=(0, 2))
    w.publish(0)
    while w.relays[1].newest < 1: w.second()
    w.die(0), w.deliver()
    assert w.core.order == [1, 2, 3] and w.relays[2].newest < 1 # who has it goes before


def test_the_actor_is_asked_only_through_a_host_of_its_own():
    w = begin(3)
    w.publish(0)
    w.deliver()
    w.die(0), w.actor_dies()
    for _ in range(60): w.second()
    assert w.commands(mb.AskActorToPush) == []
    w.be_born(0)
    w.calm_down()
    assert w.commands(mb.AskActorToPush) == [mb.AskActorToPush(0)] and w.core.newest == 2


def test_who_is_suspected_may_still_have_it():
    w = begin(3, actor_hosts=(0, 2))
    w.publish(0)
    w.second()
    w.relays[0].stopped = True
    w.actor_dies()
    for _ in range(25): w.second()
    assert w.core.newest == 1 and w.core.members[0].suspected and w.commands(mb.AskActorToPush) == []
    w.resume(w.relays[0])
    w.calm_down()
    assert w.core.newest == 1 and w.commands(mb.AskActorToPush) == []


def test_a_slow_transfer_is_left_alone():
    w = begin(4)
    w.size, links = 40, w.core.order
    for _ in range(60): w.second()
    w.publish(0)
    for _ in range(60): w.second()
    assert w.done() and w.core.order == links and w.core.failed == {} and len(w.commands(mb.SetNext)) == 4 + 3


def test_a_relay_that_is_born_again_may_be_reached_again():
    w = begin(3)
    w.tell(mb.LinkFailed, 0, 1, 'no')
    w.deliver()
    assert (0, 1) in w.core.failed
    w.die(1), w.be_born(1), w.deliver()
    assert w.core.failed == {}


@pytest.mark.parametrize('loud', [True, False])
@pytest.mark.parametrize('hosts', [3, 4, 5])
def test_a_link_that_is_never_healed(hosts, loud):
    for link in permutations(range(hosts), 2):
        w = begin(hosts)
        w.loud, w.cut = loud, {link}
        for _ in range(3):
            w.publish(0)
            w.second()
            w.calm_down(120)
            assert set(w.core.failed) <= {link}, 'the others are well'
        assert link not in pairwise(w.core.order)


@pytest.mark.parametrize('loud', [True, False])
@pytest.mark.parametrize('broken', [1, 2, 3])
def test_a_relay_that_reaches_nobody_or_is_reached_by_nobody(broken, loud):
    for cut in ({(broken, h) for h in range(4)}, {(h, broken) for h in range(4)}):
        w = begin(4)
        w.loud, w.cut = loud, cut
        for _ in range(2):
            w.publish(0)
            w.second()
            w.calm_down(300, but=[broken])
        assert w.core.newest == 2
        w.cut = set()
        w.calm_down(120)


def test_a_stopped_relay_is_cut_out_and_comes_back():
    w = begin(4)
    w.relays[1].stopped = True
    w.publish(0)
    for _ in range(14): w.second()
    assert w.core.members[1].suspected and [w.relays[h].newest for h in (0, 2, 3)] == [1, 1, 1]
    w.resume(w.relays[1])
    w.calm_down()
    said = [c for _, commands in w.log for c in commands if isinstance(c, (mb.Suspect, mb.Readmit, mb.Cut))]
    assert [type(c) for c in said] == [mb.Suspect, mb.Readmit] and w.relays[1].life == 0 and w.relays[1].newest == 1


def test_who_comes_back_with_the_newest_version_moves_nobody():
    core = mb.Membership()
    for h in range(3): core.on(mb.RelayJoined(0., h, 0, (f'host{h}', 0), newest=int(h < 2)))
    for t in range(7):
        for h in (0, 2): core.on(mb.RelayHeard(t, h, 0, int(h < 2)))
        core.on(mb.RelayTick(t))
    assert core.order == [0, 2] and not core.quiet()
    assert core.on(mb.RelayHeard(8., 1, 0, 1)) == [mb.Readmit(1), mb.SetNext(2, ('host1', 0))] and core.order == [0, 2, 1]


def test_a_stopped_relay_is_given_up():
    w = begin(3)
    w.relays[0].stopped = True
    w.publish(0)
    w.revive = True
    w.calm_down()
    for _ in range(40): w.second()
    assert w.lives[0] == 1 and w.issued == 1 and w.core.master == 0
    assert all(r.newest == 1 for r in w.relays.values()), 'the actor had it mapped'


def test_the_message_of_a_seal_was_lost():
    w = begin(3)
    w.publish(0)
    w.relays[0].sealing = None
    before = w.t
    for _ in range(12): w.second()
    w.calm_down()
    assert w.issued == 1 and w.core.newest == 1 and w.t - before < 20 and w.commands(mb.Adopt) == [mb.Adopt(0, 1)]


def test_who_does_not_adopt_is_told_again_but_not_all_the_time():
    w = begin(3)
    w.publish(0)
    w.deliver()
    w.die(0), w.be_born(0)
    w.relays[0].clumsy = True
    for _ in range(25): w.second()
    assert w.commands(mb.Adopt) == 3 * [mb.Adopt(0, 1)]
    w.relays[0].clumsy = False
    w.calm_down()
    assert w.core.newest == 1


def test_nobody_is_told_to_adopt_what_is_on_its_way():
    w = begin(4)
    for _ in range(5):
        w.publish(0)
        w.deliver()
        w.calm_down()
    assert w.commands(mb.Adopt) == []


# ---- order ---------------------------------------------------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from('xy'), st.sampled_from('abc')), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_labels(labels, random):
    "Each rack and each zone is one stretch of the chain, before and after losses and returns"
    w = World(len(labels), labels=dict(enumerate(labels)))
    hosts = list(range(len(labels)))
    random.shuffle(hosts)
    for h in hosts: w.be_born(h)
    w.publish(0)
    w.calm_down()
    for _ in range(3):
        places = [labels[h] for h in w.core.order]
        assert w.core.order[0] == 0
        assert sum(a != b for a, b in pairwise(places)) == len(set(labels)) - 1
        assert sum(a[0] != b[0] for a, b in pairwise(places)) == len({z for z, _ in labels}) - 1
        order, victim = w.core.order, random.choice(hosts)
        w.die(victim)
        w.deliver()
        w.calm_down()
        if victim: assert w.core.order == [h for h in order if h != victim]
        w.be_born(victim)
        w.calm_down()


def test_labels_and_a_link_that_fails():
    "A good order is kept although the labels know a nearer one; and they still say all the rest"
    w = begin(3, labels={0: ('z', 'a'), 1: ('z', 'b'), 2: ('z', 'a')})
    assert w.core.order == [0, 2, 1]
    w.cut = {(2, 1)}
    for _ in range(3):
        w.publish(0)
        w.second()
        w.calm_down()
    assert w.core.order == [0, 1, 2]
    w = begin(4, labels={0: ('z', 'a'), 1: ('z', 'a'), 2: ('z', 'b'), 3: ('z', 'b')})
    w.cut = {(0, 1)}
    w.publish(0)
    w.second()
    w.calm_down()
    assert w.core.order == [0, 2, 3, 1]
    w.die(3), w.be_born(3)
    w.second()
    w.calm_down()
    assert w.core.order == [0, 2, 3, 1]
    w.cut = set()
    for _ in range(65): w.second()
    assert w.core.order == [0, 1, 2, 3] and w.core.failed == {} # forgiven


def test_around_uses_all_that_is_known():
    assert mb.around([0, 1, 2, 3, 4], {(0, 1), (3, 1), (4, 1)}, (0, 1)) == [0, 3, 4, 2, 1] # whom three did not reach waits at the tail for a fourth
    assert mb.around([0, 1, 2], {(0, 1), (0, 2)}, (0, 2)) == [0, 1, 2] # nothing is better


def test_a_host_that_nobody_reaches_starves_nobody():
    "Its heartbeats come through, so it stays a member; the others lose one `progress_s`, once"
    w = begin(6)
    w.cut, late = {(h, 2) for h in range(6)}, 0
    for _ in range(20):
        w.publish(0)
        for _ in range(12): w.second()
        late += any(w.relays[h].newest < w.issued for h in (1, 3, 4, 5))
    assert late <= 1 and w.core.order[0] == 0 and w.core.order[-1] == 2 and w.relays[2].newest == 0
    w.cut = set()
    w.calm_down()
    assert w.relays[2].newest == w.issued


def test_a_head_stays_although_another_is_heard_first():
    core = mb.Membership()
    for h in range(3): core.on(mb.RelayJoined(0., h, 0, (f'host{h}', 0), actor=h == 0, newest=0))
    core.on(mb.VersionSealed(1., 1, 0))
    for h in (2, 1): assert core.on(mb.RelayHeard(1., h, 0, 1)) == []
    assert core.order == [0, 1, 2]
    core.on(mb.SealGone(2., 0)) # nobody can give it the version any more
    assert core.order == [1, 2, 0]


def test_the_first_link_that_stands_still_is_to_blame():
    core = mb.Membership()
    for h in range(4): core.on(mb.RelayJoined(0., h, 0, (f'host{h}', 0), actor=h == 0, newest=0))
    for t in range(13):
        for h, had in enumerate([(1,), (0, 1, 5), (0, 1, 3), (0, 1, 3)]): core.on(mb.RelayHeard(t, h, 0, *had))
        core.on(mb.RelayTick(t))
    assert core.failed.keys() == {(0, 1)} and core.order == [0, 2, 3, 1]


def test_time_does_not_go_back():
    core = mb.Membership()
    for h in range(2): core.on(mb.RelayJoined(100., h, 0, (f'host{h}', 0)))
    for t in (100., 101., 102., 103.):
        assert core.on(mb.RelayTick(t)) == []
        for h in range(2): core.on(mb.RelayHeard(t - 50, h, 0, 0)) # a letter that took its time
    assert core.now == 103


def test_a_version_that_was_never_announced_goes_first_too():
    core = mb.Membership()
    for h in range(3): core.on(mb.RelayJoined(0., h, 0, (f'host{h}', 0), newest=1))
    core.on(mb.RelayHeard(1., 1, 0, 1, arriving=2, nbytes=1))
    assert not core.quiet()
    core.on(mb.RelayJoined(1., 3, 0, ('host3', 0), actor=True, newest=1))
    assert core.order == [0, 1, 2, 3], 'not yet: something is in flight'
    core.on(mb.RelayHeard(2., 1, 0, 2))
    assert core.order == [1, 2, 3, 0] and core.newest == 2


def test_without_labels_nobody_moves():
    w = World(4)
    for h in (2, 0, 3, 1): w.be_born(h)
    w.deliver()
    assert w.core.order == [0, 2, 3, 1] # the host of the actor was put first when it came
    w.die(3), w.deliver()
    assert w.core.order == [0, 2, 1]
    w.be_born(3), w.deliver()
    assert w.core.order == [0, 2, 1, 3]


# ---- words ---------------------------------------------------------------------------------------------------------

EVENTS = [mb.RelayJoined(0., 1, 2, ('10.0.0.1', 7), True, 'z', 'r', 3), mb.RelayGone(1., 1, 2, 'killed'), mb.RelayHeard(2., 1, 2, 3, 4, 99), mb.LinkFailed(3., 1, 2, 'no'),
          mb.VersionSealed(4., 5, 1), mb.SealGone(5., 1), mb.RelayTick(6.)]

@pytest.mark.parametrize('event', EVENTS)
def test_events_can_be_recorded(event):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=type(event)) == event


def test_old_lives_are_not_believed():
    core = mb.Membership()
    for h in range(2): core.on(mb.RelayJoined(0., h, 3, (f'host{h}', 3), newest=1))
    for e in (mb.RelayGone(1., 1, 2), mb.RelayHeard(1., 1, 2, 9), mb.RelayJoined(1., 1, 3, ('elsewhere', 0)), mb.RelayJoined(1., 1, 1, ('elsewhere', 0)), mb.RelayHeard(1., 7, 0, 9)):
        assert core.on(e) == [] and core.order == [0, 1] and core.newest == 1
    core.on(mb.RelayGone(2., 1, 3))
    assert core.on(mb.RelayJoined(2., 1, 3, ('host1', 3))) == [] and core.order == [0]
    assert core.on(mb.RelayGone(2., 7, 5)) == [] == core.on(mb.RelayJoined(2., 7, 5, ('host7', 5))) # its death was told before its birth
    assert core.on(mb.RelayJoined(3., 1, 4, ('host1', 4))) == [mb.SetNext(1, None), mb.SetNext(0, ('host1', 4))]
    assert mb.SetNext(1, None) in core.on(mb.RelayJoined(4., 1, 5, ('host1', 5))) # a new life is told, also when the old one was never lost
