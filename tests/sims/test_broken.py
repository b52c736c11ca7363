"""The check of the check: protocols and nodes that are broken on purpose, each caught by the judge.

`CAUGHT` names for each the first seed that was found, of 0 to 199, whose small swarm shows it; the test begins there, and needs no other as long as nothing else changes.
Run as a script this module looks for them anew: `python tests/sims/test_broken.py [NAME …]`.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.sims.breaking import Broken
from torch import Tensor

from farflung.compression.codec import Payload
from farflung.node.apply import Applier
from farflung.node.catchup import Catchup
from farflung.node.exchange import Exchange
from farflung.node.executor import Executor
from farflung.node.peer import Left, Peer
from farflung.node.replica_trainer import ReplicaTrainer
from farflung.node.residuals import Residuals
from farflung.node.statesync import Download
from farflung.node.trainer import Trainer
from farflung.protocol import chain, ledger, patience, planning, proposer
from farflung.protocol.attendance import Attendance
from farflung.protocol.chain import Certified, Commit, RoundResult, Rules, Vote
from farflung.protocol.effects import Effect, Reduce, RoundOver, SaveVote, Send
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import Ledger, Suspended
from farflung.protocol.messages import Committed
from farflung.protocol.participation import Participation
from farflung.protocol.proposer import Proposer, Surroundings
from farflung.sims.chaos import brisk_plan
from farflung.sims.simulation import Report, simulate
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.toy import MemoryStorage
from farflung.training.coupled import Coupled, Update


def run(seed: int, *, fragments: int = 1, calm_s: float = 0.0) -> Report:
    """A small swarm in which something goes wrong every few seconds, until the judge objects; and a calm in the end, where that is what it takes."""
    plan = brisk_plan(seed, churn_s=80.0, calm_s=calm_s or 10.0, fragments=fragments)
    return simulate(replace(plan, calm_s=calm_s, stop_when_broken=True))


FRAGMENTS = {"lets_the_momentum_of_other_fragments_decay": 3, "moves_one_fragment_only": 3}
"""That a model has, where what is broken shows only with several."""

CALM_S = {"never_trains_once_it_was_started_again": 45.0}
"""Of the calm, where what is broken shows only then."""


def run_broken(name: str, seed: int) -> list[str]:
    return run(seed, fragments=FRAGMENTS.get(name, 1), calm_s=CALM_S.get(name, 0.0)).violations


broken = Broken(run_broken, neighbours=16)


# ---- the reduction -------------------------------------------------------------------------------------------------


def reweighted(
    monkeypatch: pytest.MonkeyPatch,
    weigh: Callable[[Participation, tuple[tuple[bytes, float], ...]], tuple[tuple[bytes, float], ...]],
) -> None:
    reduce = Participation._reduce

    def wrong(self: Participation, part: int, contributors: Collection[bytes], *, early: bool) -> Reduce:
        asked = reduce(self, part, contributors, early=early)
        return replace(asked, weights=weigh(self, asked.weights))

    monkeypatch.setattr(Participation, "_reduce", wrong)


@broken
def divides_by_group_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def weigh(part: Participation, weights: tuple[tuple[bytes, float], ...]) -> tuple[tuple[bytes, float], ...]:
        return tuple((peer, weight * len(weights) / len(part.plan.members)) for peer, weight in weights)

    reweighted(monkeypatch, weigh)


@broken
def weighs_all_contributors_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    reweighted(monkeypatch, lambda part, weights: tuple((peer, 1.0 / len(weights)) for peer, _ in weights))


@broken
def counts_a_contribution_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    reweighted(monkeypatch, lambda part, weights: (*weights, weights[0]))


@broken
def reduces_over_whoever_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def weigh(part: Participation, weights: tuple[tuple[bytes, float], ...]) -> tuple[tuple[bytes, float], ...]:
        have = set.intersection(*part._collected.values())
        if not have:
            return weights  # a mean of nobody is refused, and nothing for a judge
        tokens = {c.peer: c.ready.tokens for c in part.plan.contributors if c.peer in have}
        return tuple((peer, tokens[peer] / sum(tokens.values())) for peer in sorted(tokens))

    reweighted(monkeypatch, weigh)


@broken
def counts_nobody_but_one_when_anybody_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = planning.choose_cut

    def one(
        reports: Mapping[bytes, frozenset[bytes]], sizes: Mapping[bytes, int], tokens: Mapping[bytes, int]
    ) -> tuple[tuple[bytes, ...], frozenset[bytes]]:
        counted, owners = choose(reports, sizes, tokens)
        return (counted[:1] if len(counted) < len(tokens) else counted), owners

    monkeypatch.setattr(proposer, "choose_cut", one)


@broken
def moves_one_fragment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rules, "span", lambda self, parent: (0, self.cuts[parent.width]))


@broken
def early_means_hold_whatever_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Participation, "_is_void", False)


@broken
def owner_keeps_its_part_unquantised(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[bytes, bytes, int], Tensor] = {}
    encode, decode = Residuals.encode_mean, Exchange.decode

    def remember(self: Residuals, plan_id: bytes, x: Tensor, start: int) -> memoryview:
        kept[self._me, plan_id, start] = x.clone()
        return encode(self, plan_id, x, start)

    def prefer(self: Exchange, result: RoundResult, means: dict[int, Payload], *, last: bool) -> list[Update]:
        me = self._network.peer_id
        return [(a, b, kept.get((me, result.plan, a), mean)) for a, b, mean in decode(self, result, means, last=last)]

    monkeypatch.setattr(Residuals, "encode_mean", remember)
    monkeypatch.setattr(Exchange, "decode", prefer)


# ---- the history ---------------------------------------------------------------------------------------------------


@broken
def decides_without_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chain, planning, proposer, patience):
        monkeypatch.setattr(module, "is_quorum", lambda view, voters: bool(set(view) & set(voters)))


@broken
def commits_without_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    def vote(self: Proposer, s: Surroundings, now: float) -> list[Effect]:
        assert self.commit is not None
        votes = tuple(Vote(peer, signature) for peer, signature in sorted(self.votes.items()))
        certified = Certified(self.commit, self.ballot, votes)
        return [Send(p, Committed(certified)) for p in sorted({s.me, *s.membership.known()})]

    monkeypatch.setattr(Proposer, "_vote", vote)
    monkeypatch.setattr(chain, "check_certificate", lambda *_, **__: None)


@broken
def counts_tokens_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = chain.successor

    def twice(swarm: bytes, parent: Commit, *rest: Any, **what: Any) -> Commit:
        commit = follow(swarm, parent, *rest, **what)
        return msgspec.structs.replace(commit, tokens=2 * commit.tokens - parent.tokens)

    monkeypatch.setattr(chain, "successor", twice)


@broken
def forgets_its_vote_when_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStorage, "load_votes", lambda self: [])


@broken
def tells_of_its_vote_before_it_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = Executor._execute

    async def hurry(self: Executor, effect: Effect, group: asyncio.TaskGroup) -> None:
        if isinstance(effect, SaveVote):
            group.create_task(execute(self, effect, group))
        else:
            await execute(self, effect, group)

    monkeypatch.setattr(Executor, "_execute", hurry)


@broken
def says_nothing_of_why_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attendance, "_why_missed", lambda self, result: "")


@broken
def gives_up_what_it_has_sent_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = Executor._execute

    async def silent(self: Executor, effect: Effect, group: asyncio.TaskGroup) -> None:
        match effect:
            case RoundOver(None, contributed=False):
                self._trainer.over()
            case _:
                await execute(self, effect, group)

    monkeypatch.setattr(Executor, "_execute", silent)


@broken
def accepts_replayed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attendance, "has_seen", lambda self, plan: False)


# ---- samples -------------------------------------------------------------------------------------------------------


def other_ledger(monkeypatch: pytest.MonkeyPatch, change: Callable[[Ledger, Ledger], Ledger]) -> None:
    advance = ledger.advance
    monkeypatch.setattr(ledger, "advance", lambda before, **what: change(before, advance(before, **what)))


@broken
def hands_a_window_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(before: Ledger, after: Ledger) -> Ledger:
        return msgspec.structs.replace(after, cursor=max(before.cursor, after.cursor - 2))

    other_ledger(monkeypatch, change)


@broken
def frees_samples_that_are_still_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(before: Ledger, after: Ledger) -> Ledger:
        leased = [s.intervals for s in after.suspended if s not in before.suspended]
        return msgspec.structs.replace(after, free=ledger.join(after.free, *leased))

    other_ledger(monkeypatch, change)


@broken
def forgets_the_samples_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(before: Ledger, after: Ledger) -> Ledger:
        kept: tuple[Suspended, ...] = ()
        return msgspec.structs.replace(after, suspended=kept)

    other_ledger(monkeypatch, change)


@broken
def keeps_the_samples_of_the_dead_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = ledger.advance
    monkeypatch.setattr(ledger, "advance", lambda before, **what: advance(before, **(what | {"lease": 1 << 40})))


@broken
def begins_the_lease_of_the_dead_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = ledger.advance

    def renewed(before: Ledger, **what: Any) -> Ledger:
        kept = tuple(msgspec.structs.replace(s, version=what["version"]) for s in before.suspended)
        return advance(msgspec.structs.replace(before, suspended=kept), **what)

    monkeypatch.setattr(ledger, "advance", renewed)


@broken
def leaves_samples_in_the_hands_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(before: Ledger, after: Ledger) -> Ledger:
        gone = tuple(ledger.Holding(s.peer, s.intervals) for s in after.suspended)
        held = tuple(sorted((*after.held, *gone), key=lambda holding: holding.peer))
        return msgspec.structs.replace(after, held=held, suspended=())

    other_ledger(monkeypatch, change)


@broken
def never_hands_out_again_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = ledger.advance

    def fresh_only(before: Ledger, **what: Any) -> Ledger:
        after = advance(msgspec.structs.replace(before, free=()), **what)
        return msgspec.structs.replace(after, free=ledger.join(before.free, after.free))

    monkeypatch.setattr(ledger, "advance", fresh_only)


@broken
def keeps_progress_on_samples_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Trainer.settle
    monkeypatch.setattr(Trainer, "settle", lambda self, *what: settle(self, *what) or True)


# ---- progress and the outer state ----------------------------------------------------------------------------------


@broken
def loses_progress_with_a_missed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Coupled.apply

    def lose(
        self: Coupled, updates: Sequence[Update], *, contributed: bool, told: Mapping[int, Tensor] | None = None
    ) -> None:
        apply(self, updates, contributed=contributed, told=told)
        if not contributed:
            Coupled.discard_progress(self)

    monkeypatch.setattr(Coupled, "apply", lose)


@broken
def gives_up_its_progress_with_a_missed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Applier._take_round

    async def give_up(self: Applier, commit: Commit, prepared: Any) -> None:
        await take(self, commit, prepared)
        if not self._counted(prepared.result) and self._trainer.progress.steps:
            self.give_up("it missed a round")
            await self._learn(self._learner.discard_progress)

    monkeypatch.setattr(Applier, "_take_round", give_up)


@broken
def keeps_progress_that_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Coupled.apply

    def keep(
        self: Coupled, updates: Sequence[Update], *, contributed: bool, told: Mapping[int, Tensor] | None = None
    ) -> None:
        apply(self, updates, contributed=False)
        if contributed:
            self._take_sent(())

    monkeypatch.setattr(Coupled, "apply", keep)


@broken
def moves_for_a_round_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = Exchange.decided

    async def move(self: Exchange, height: int, plan_id: bytes) -> None:
        if any(plan != plan_id for plan, at in self._heights.items() if at <= height):
            self._learner.outer.params.mul_(1.0001)
        await decided(self, height, plan_id)

    monkeypatch.setattr(Exchange, "decided", move)


@broken
def applies_a_repeated_commit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Coupled.apply

    def twice(
        self: Coupled, updates: Sequence[Update], *, contributed: bool, told: Mapping[int, Tensor] | None = None
    ) -> None:
        apply(self, updates, contributed=contributed, told=told)
        apply(self, updates, contributed=False)

    monkeypatch.setattr(Coupled, "apply", twice)


@broken
def lets_the_momentum_of_other_fragments_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Coupled.apply

    def decay(
        self: Coupled, updates: Sequence[Update], *, contributed: bool, told: Mapping[int, Tensor] | None = None
    ) -> None:
        apply(self, updates, contributed=contributed, told=told)
        moved = {number for start, stop, _ in updates for number in range(start, stop)}
        self.outer.momentum[[number for number in range(self.num_parameters) if number not in moved]] *= 0.5

    monkeypatch.setattr(Coupled, "apply", decay)


@broken
def accepts_state_of_a_stale_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async def as_it_is(self: Catchup, download: Download, version: int) -> None:
        download.have.update(dict.fromkeys(download.have, version))

    async def trust(self: Catchup, *_: Any) -> bool:
        return True

    monkeypatch.setattr(Catchup, "_roll_forward", as_it_is)
    monkeypatch.setattr(Catchup, "_verified", trust)


# ---- being there ---------------------------------------------------------------------------------------------------


@broken
def ends_when_it_has_missed_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    start, execute = Peer.run, Executor._execute
    peers: dict[PeerId, Peer] = {}

    async def run(self: Peer, **what: Any) -> Left:
        peers[self.member.me] = self
        return await start(self, **what)

    async def end(self: Executor, effect: Effect, group: asyncio.TaskGroup) -> None:
        await execute(self, effect, group)
        if isinstance(effect, RoundOver) and not effect.contributed:
            peers[self._member.me].stop("it has missed a round")

    monkeypatch.setattr(Peer, "run", run)
    monkeypatch.setattr(Executor, "_execute", end)


@broken
def all_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Peer.run

    async def run(self: Peer, **what: Any) -> Left:
        asyncio.get_running_loop().call_at(START_UNIX_S + 40.0, self.stop, "it is late")
        return await start(self, **what)

    monkeypatch.setattr(Peer, "run", run)


@broken
def never_trains_once_it_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, step = Peer.run, ReplicaTrainer._step
    idle: set[PeerId] = set()

    async def run(self: Peer, *, history: list[Certified], **what: Any) -> Left:
        if len(history) > 1:
            idle.add(self.member.me)
        return await start(self, history=history, **what)

    async def stand(self: ReplicaTrainer) -> bool:
        return self.me not in idle and await step(self)

    monkeypatch.setattr(Peer, "run", run)
    monkeypatch.setattr(ReplicaTrainer, "_step", stand)


# ---- what catches them ---------------------------------------------------------------------------------------------

CAUGHT: dict[str, tuple[int, int]] = {
    "divides_by_group_size": (0, 4),
    "weighs_all_contributors_alike": (0, 4),
    "counts_a_contribution_twice": (0, 4),
    "reduces_over_whoever_came": (1, 4),
    "counts_nobody_but_one_when_anybody_is_missing": (0, 3),
    "moves_one_fragment_only": (0, 2),
    "early_means_hold_whatever_the_cut": (30, 4),
    "owner_keeps_its_part_unquantised": (0, 1),
    "decides_without_a_quorum": (0, 5),
    "commits_without_votes": (0, 5),
    "counts_tokens_twice": (0, 4),
    "tells_of_its_vote_before_it_is_on_disk": (0, 5),
    "says_nothing_of_why_it_missed": (0, 9),
    "gives_up_what_it_has_sent_without_a_word": (29, 9),
    "hands_a_window_out_twice": (0, 6),
    "frees_samples_that_are_still_leased": (0, 6),
    "forgets_the_samples_of_the_dead": (0, 6),
    "keeps_the_samples_of_the_dead_for_ever": (1, 6),
    "begins_the_lease_of_the_dead_anew": (0, 6),
    "leaves_samples_in_the_hands_of_the_dead": (0, 6),
    "never_hands_out_again_what_is_free": (0, 6),
    "keeps_progress_on_samples_of_others": (0, 6),
    "loses_progress_with_a_missed_round": (0, 2),
    "gives_up_its_progress_with_a_missed_round": (0, 2),
    "keeps_progress_that_was_counted": (0, 2),
    "moves_for_a_round_that_failed": (8, 2),
    "lets_the_momentum_of_other_fragments_decay": (0, 2),
    "accepts_state_of_a_stale_version": (13, 2),
    "forgets_its_vote_when_killed": (6, 5),
    "applies_a_repeated_commit_again": (0, 2),
    "ends_when_it_has_missed_a_round": (0, 0),
    "all_end_together": (0, 0),
    "never_trains_once_it_was_started_again": (0, 0),
    "accepts_replayed_plans": (0, 7),
}
"""Name → first seed, and the invariant that it breaks."""


@pytest.mark.parametrize("name", broken)
def test_what_is_broken_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, which = CAUGHT[name]
    assert broken.first_violation(name, first, monkeypatch).startswith(f"invariant {which}:")


@pytest.mark.parametrize("seed", sorted({seed for seed, _ in CAUGHT.values()}))
def test_what_is_whole_passes(seed: int) -> None:
    assert run(seed).violations == []


if __name__ == "__main__":
    broken.search()
