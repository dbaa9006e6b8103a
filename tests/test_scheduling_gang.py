"The gang's rule under any order of births, deaths, complaints, looks and late messages"
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from laminar_sdk.scheduling.gang import Admit, Begin, End, GangRule, Look, Lost, Own, Refuse, TakeAlong


class World(RuleBasedStateMachine):
    "Processes that obey, but late: what they say and what is said of them arrives in any order"
    @initialize(size=st.integers(1, 4))
    def begin(self, size):
        self.gang, self.size, self.births = GangRule(size), size, [0]*size
        self.alive, self.waits, self.complains = {}, set(), set() # rank → birth; (rank, birth) who wait for the beginning, or for an answer
        self.beginning, self.downs, self.looks = {}, [], [] # life → births; what will be heard
        self.lived, self.lost = [], 0

    def do(self, commands):
        for c in commands:
            if isinstance(c, Begin):
                assert set(self.gang.here) == set(range(self.size)) and c.life not in self.beginning
                self.beginning[c.life] = dict(self.gang.here)
            if isinstance(c, Admit):
                births = self.beginning.pop(self.gang.life)
                assert births == self.gang.here and set(c.ranks) == set(births)
                self.lived.append(births)
                self.waits -= set(births.items())
            if isinstance(c, Refuse): # their waiting raises, and they are buried
                self.waits -= {(r, b) for r, b in self.waits if r in c.ranks}
                for r in c.ranks: self.kill(r)
            if isinstance(c, (TakeAlong, End)): self.kill(c.rank)
            if isinstance(c, Lost): self.lost += 1
            if isinstance(c, Look): self.looks.append((c.rank, c.birth))
            if isinstance(c, Own):
                self.complains = {(r, b) for r, b in self.complains if r != c.rank}
                self.kill(c.rank) # its life raises, and it is buried

    def kill(self, rank):
        if rank in self.alive: self.downs.append((rank, self.alive.pop(rank)))

    @rule(rank=st.integers(0, 3))
    def born(self, rank):
        "A process comes up when the one before was buried"
        if rank >= self.size or rank in self.alive or any(r == rank for r, _ in self.downs): return
        self.births[rank] += 1
        self.alive[rank] = self.births[rank]
        self.waits.add((rank, self.births[rank]))
        self.do(self.gang.on_up(rank, self.births[rank]))

    @rule(rank=st.integers(0, 3))
    def dies(self, rank):
        self.kill(rank)

    @rule(data=st.data())
    def heard(self, data):
        "A death is heard, sooner or later"
        if self.downs: self.hear(self.downs.pop(data.draw(st.integers(0, len(self.downs) - 1))))

    def hear(self, down):
        self.waits.discard(down)
        self.complains.discard(down)
        self.do(self.gang.on_down(*down, 'died'))

    @rule(data=st.data(), well=st.booleans())
    def began(self, data, well):
        "A beginning ends, maybe one that is long over"
        if not self.beginning: return
        life = data.draw(st.sampled_from(sorted(self.beginning)))
        births = self.beginning[life]
        all_alive = all(self.alive.get(r) == b for r, b in births.items())
        said = self.gang.on_begun(life) if well and all_alive else self.gang.on_failed(life, 'one was not there')
        if not (said and isinstance(said[0], Admit)): del self.beginning[life]
        self.do(said)

    @rule(rank=st.integers(0, 3))
    def complains_of(self, rank):
        if self.gang.phase != 'living' or rank not in self.alive or self.gang.here.get(rank) != self.alive[rank]: return
        self.complains.add((rank, self.alive[rank]))
        self.do(self.gang.on_complaint(rank, self.alive[rank]))

    @rule(data=st.data(), hangs=st.booleans())
    def looked(self, data, hangs):
        if self.looks: self.look(self.looks.pop(data.draw(st.integers(0, len(self.looks) - 1))), hangs)

    def look(self, who, hangs=False):
        how = 'dead' if self.alive.get(who[0]) != who[1] else 'silent' if hangs else 'alive'
        self.do(self.gang.on_seen(*who, how))

    @rule(rank=st.integers(0, 3), birth=st.integers(0, 2), life=st.integers(0, 2))
    def late(self, rank, birth, life):
        "Something of long ago changes nothing"
        before = repr(self.gang), dict(self.gang.here)
        if self.gang.here.get(rank) == birth or life >= self.gang.life: return
        said = self.gang.on_down(rank, birth, 'late') + self.gang.on_seen(rank, birth, 'alive') + self.gang.on_seen(rank, birth, 'silent') + self.gang.on_begun(life) + self.gang.on_failed(life, 'late')
        assert said == [] and before == (repr(self.gang), dict(self.gang.here))

    @invariant()
    def nobody_lives_with_a_stranger(self):
        if not hasattr(self, 'gang'): return
        for births in self.lived[:-1]: # of a life that is over nobody lives, or it will be heard that he does not
            assert all(self.alive.get(r) != b for r, b in births.items())
        if self.gang.phase == 'living': assert self.gang.here == self.lived[-1]

    def teardown(self):
        "When all that is under way has arrived and nobody dies any more, they live, together, and nobody waits for an answer"
        if not hasattr(self, 'gang'): return
        for _ in range(60):
            while self.downs: self.hear(self.downs.pop())
            while self.looks: self.look(self.looks.pop())
            for r in range(self.size): self.born(r)
            for life in sorted(self.beginning):
                if life not in self.beginning: continue
                well = all(self.alive.get(r) == b for r, b in self.beginning[life].items())
                said = self.gang.on_begun(life) if well else self.gang.on_failed(life, 'one was not there')
                if not (said and isinstance(said[0], Admit)): del self.beginning[life]
                self.do(said)
            if self.gang.phase == 'living' and not self.downs: break
        assert self.gang.phase == 'living' and self.gang.here == self.alive == self.lived[-1] and not self.waits and not self.complains


World.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = World.TestCase


@given(st.integers(2, 5), st.data())
def test_a_death_takes_all_along_and_is_told_once(size, data):
    gang = GangRule(size)
    for r in data.draw(st.permutations(range(size))): said = gang.on_up(r, 1)
    assert said == [Begin(1)] and gang.on_begun(1) == [Admit(tuple(range(size)))]
    first = data.draw(st.integers(0, size - 1))
    said = gang.on_down(first, 1, 'died')
    assert said == [TakeAlong(r) for r in range(size) if r != first] + [Lost(first, 'died')]
    assert [gang.on_down(r, 1, 'died') for r in range(size)] == [[]]*size
