"""Whether an outer step is what the round gave that it was taken for (invariants 2, 4 and 7), by what its contributors sent and what its owners met."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from farflung.protocol import ledger
from farflung.protocol.chain import Commit, PartResult, RoundResult
from farflung.protocol.messages import Part
from farflung.protocol.types import Intervals
from farflung.sims.chronicle import KEPT_STATES, Chronicle
from farflung.sims.outer_audit import same_bits, taken_step, wanted_mean
from farflung.sims.swarm import Swarm
from farflung.training.outer import OuterState
from farflung.training.rules import halfway

KEPT_GRADIENTS = 8
"""Pseudo-gradients remembered of each peer: a plan may be decided some plans later."""

KEPT_SAMPLES = 256
"""Of so many we remember of which samples they were: who has not heard from an honest member for long may decide about an old one."""

KEPT_MEETINGS = 1024
"""What they added to the means of parts; until these are committed."""

MEETING_ERROR = 1e-5
"""Of what a meeting adds, fp32 arithmetic on a few values of order 1."""

MEAN_ERROR = 0.03
"""Largest error of a round's mean, relative to the mean, or to what is coded where contributions cancel each other out and leave little: int8 makes one of
0.006 in each direction (docs/compression.md)."""

ROUNDING = 1e-3
"""Largest error of fp32 arithmetic on values of order 1: hundreds of additions of numbers around 0.01."""


class Steps:
    """See the module."""

    def __init__(self, violate: Callable[[int, str], None], *, known_means: bool) -> None:
        """`known_means`: see `judge.Judge`."""
        self._violate = violate
        self._known_means = known_means
        self._gradients: dict[int, OrderedDict[Intervals, Tensor]] = {}
        """By peer and samples."""
        self._dropped: dict[int, OrderedDict[Intervals, None]] = {}
        """By peer, samples of those that are not remembered any more."""
        self._met: OrderedDict[tuple[bytes, int], Tensor] = OrderedDict()
        """By plan and start of the part, what meetings have added to means."""
        self._came_to: defaultdict[int, deque[Tensor]] = defaultdict(lambda: deque(maxlen=KEPT_STATES))
        """By peer, the outer parameters that its lives began with and of its last rounds."""

    def contributes(self, index: int, samples: tuple[int, ...], gradient: Tensor) -> None:
        """A peer sends what it has made of these samples."""
        made_of = ledger.join([(number, number + 1) for number in samples])
        kept = self._gradients.setdefault(index, OrderedDict())
        kept[made_of] = gradient.clone()
        dropped = self._dropped.setdefault(index, OrderedDict())
        dropped.pop(made_of, None)
        if len(kept) > KEPT_GRADIENTS:
            dropped[kept.popitem(last=False)[0]] = None
        if len(dropped) > KEPT_SAMPLES:
            dropped.popitem(last=False)

    def came_to(self, params: Tensor, index: int, known: Iterable[Tensor] = ()) -> None:
        """Others may meet a peer at any state that it comes to: an attacker's, of which nobody judges how, and one that its group has long left behind. `known`: states
        that are kept anyway, one of which it may be."""
        same = next((state for state in known if torch.equal(state, params)), None)
        self._came_to[index].append(params.clone() if same is None else same)

    def meets(
        self,
        swarm: Swarm,
        index: int,
        own: Chronicle,
        groups: Iterable[Chronicle],
        plan: bytes,
        part: Part,
        term: Tensor,
    ) -> None:
        """An owner adds this to the mean of its part, for how another group stands. It is worked out anew from what all have held: the owner is not believed."""
        piece = slice(part.start, part.stop)
        weight = halfway(swarm.outfit.terms.next_rule(swarm.peers[index].member.head.commit))
        others = [group for group in groups if group is not own]
        for mine in [swarm.learners[index].outer.params, *own.recently()]:
            tried = set[int]()  # many are the same ones
            for other in self._all_held(swarm, index, [*others, own]):  # whom it met may have come to us since
                if id(other) in tried:
                    continue
                tried.add(id(other))
                wanted = weight * (mine[piece] - other[piece].bfloat16().float())
                if torch.allclose(wanted, term, rtol=MEETING_ERROR, atol=MEETING_ERROR):
                    self._note_met(plan, part, wanted)
                    return
        if swarm.ids[index] not in swarm.attackers:
            self._violate(4, f"peer {index} adds to a mean what is not on the way to another group")
        self._note_met(plan, part, term)

    def _all_held(self, swarm: Swarm, index: int, groups: Iterable[Chronicle]) -> Iterator[Tensor]:
        """Outer parameters that others hold or have held; the likeliest first, for there may be thousands."""
        for group in groups:
            yield from group.recently()
        for peer in sorted(swarm.peers):
            if peer != index:
                yield swarm.learners[peer].outer.params
        for states in self._came_to.values():
            yield from states

    def _note_met(self, plan: bytes, part: Part, term: Tensor) -> None:
        self._met[plan, part.start] = term.clone()
        while len(self._met) > KEPT_MEETINGS:
            self._met.popitem(last=False)

    def check(self, swarm: Swarm, group: Chronicle, outer: OuterState, version: int, height: int) -> None:
        """The step from the last version to this one, as the first peer took it."""
        before = group.stood()
        if before is not None and version <= before[0]:
            return
        group.came_to(version, outer.params, outer.momentum)
        commit, parent = group.commit(height), group.commit(height - 1)
        if before is None or before[0] != version - 1 or commit is None or commit.round is None or parent is None:
            return
        _, params, momentum = before
        mean, step = taken_step(swarm.outfit.terms.rule(commit), (params, momentum), (outer.params, outer.momentum))
        parts = [slice(part.start, part.stop) for part in commit.round.parts if part.digest]
        stepped, stays = params.clone(), torch.ones_like(params, dtype=torch.bool)
        for part in parts:
            stepped[part] -= step[part]
            stays[part] = False
        if (stepped - outer.params).abs().max() > ROUNDING:
            self._violate(2, f"version {version} is not one outer step from version {version - 1}")
        for what, was, is_ in (("parameters", params, outer.params), ("momentum", momentum, outer.momentum)):
            if not same_bits(was[stays], is_[stays]):  # other fragments, and parts left out for everybody alike
                self._violate(2, f"version {version} has other {what} than {version - 1} where its round moved nothing")
        shares = self._shares(swarm, commit, parent)
        if shares is None or not self._known_means:
            return
        got, wanted, added = torch.cat([mean[part] for part in parts]), [], []
        for result in (result for result in commit.round.parts if result.digest):
            said = [(gradient[result.start : result.stop], weight) for gradient, weight in shares]
            decoded, summed = wanted_mean(
                swarm.outfit.terms,
                commit,
                result.start,
                said,
                self._met_in(commit.round, result),
                mean[result.start : result.stop],
            )
            wanted.append(decoded)
            added.append(torch.stack(summed))
        # errors of contributions are independent
        scale = torch.maximum(torch.cat(wanted).norm(), torch.cat(added, dim=1).norm())
        error = float((got - torch.cat(wanted)).norm() / scale.clamp(min=1e-12))
        if error > MEAN_ERROR:
            self._violate(4, f"the mean of round {height} is {error:.1%} off that of its contributors")

    def _met_in(self, round_: RoundResult, part: PartResult) -> Tensor | None:
        """What a meeting has added to the mean of a part; None without one."""
        return self._met.get((round_.plan, part.start))

    def _shares(self, swarm: Swarm, commit: Commit, parent: Commit) -> list[tuple[Tensor, float]] | None:
        """What the contributors sent, and its share of all tokens. None where that is not known, and when the samples they sent are not those
        that count."""
        assert commit.round is not None
        total = sum(c.tokens for c in commit.round.contributors)
        shares = []
        for contribution in commit.round.contributors:
            index = swarm.numbers[contribution.peer]
            counted, _ = ledger.split(parent.ledger.window(contribution.peer), contribution.samples)
            samples = ledger.join(counted)
            gradient = self._gradients.get(index, OrderedDict()).get(samples)
            if gradient is None:
                if contribution.peer not in swarm.attackers and samples not in self._dropped.get(index, ()):
                    self._violate(6, f"peer {index} contributed other samples than commit {commit.height} counts")
                return None
            shares.append((gradient, contribution.tokens / total))
        return shares
