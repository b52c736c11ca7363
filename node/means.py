"""Encoded means of rounds: what a commit is made of, kept until nobody can need it any more.

A part counts as held only once it is on disk: members report what they hold, votes follow, and a node that is killed and started again still has
what it voted for. So does everybody else, and a commit can never outlive its bytes. In memory are the means of undecided plans only; on disk,
besides, those of recent commits, for those who catch up, and all since the last checkpoint of the learner, or the last few while its state is
being downloaded.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from farflung.compression.codec import Payload
from farflung.compression.digest import digest_of
from farflung.node.disk import KEPT_ROUNDS
from farflung.node.door import Door
from farflung.node.storage import Storage


class MeanStore:
    """Means by (plan, part)."""

    def __init__(self, storage: Storage, side: Door) -> None:
        self._storage = storage
        self._aside = side.run
        self._undecided: dict[bytes, dict[int, Payload]] = {}
        self._protected: set[bytes] = set()
        self._digests: dict[tuple[bytes, int], bytes] = {}
        """Of undecided plans and recent commits, so that what comes again is neither checked nor hashed nor saved again."""
        self._early: set[tuple[bytes, int]] = set()
        """Of these, means that may be void."""
        self._confirmed: set[bytes] = set()
        """Plans of which no mean is void."""
        self._writing = asyncio.Lock()
        self._coming = Counter[bytes]()
        """Means of each plan that are about to be kept."""
        self._committed: deque[bytes] = deque()
        """Recent ones, the oldest first."""
        self._passed: deque[bytes] = deque()
        """And those that were not applied here (`pass_by`)."""

    async def put(
        self,
        plan: bytes,
        part: int,
        payload: Payload,
        *,
        early: bool = False,
        replace: bool = False,
        take: Callable[[Payload], Payload] | None = None,
    ) -> bytes:
        """Keep a mean of a plan that is not decided yet; it is on disk when this returns. Returns its digest.

        What comes from others goes through `take` first, behind the same door, and what that returns is kept; raises what that raises, with nothing changed.

        What is held was reported as held, so another mean of the same part changes nothing, and the digest of the one that stays is
        returned; unless the proposer has told us to `replace` it, or what is held came `early` (`protocol.participation`), and this did not.
        """
        key, of_plan = (plan, part), self._undecided.setdefault(plan, {})
        self._coming[plan] += 1
        try:
            async with self._writing:  # so that the last on disk is the one that is held
                held = self._digests.get(key)
                void = key in self._early and plan not in self._confirmed
                if held is not None and not replace and (early or not void):
                    return held
                payload, digest = await self._aside(self._save, plan, part, payload, take, held)
                if self._undecided.get(plan) is of_plan:
                    self._hold(key, payload, digest, early=early)
                elif plan not in {
                    *self._undecided,
                    *self._committed,
                    *self._passed,
                }:  # given up meanwhile: nobody will ask for this mean
                    await self._aside(self._storage.drop_means, plan)
                return digest
        finally:
            self._coming[plan] -= 1
            if not self._coming[plan]:
                del self._coming[plan]
                if not of_plan and self._undecided.get(plan) is of_plan:  # all were refused
                    del self._undecided[plan]

    def _hold(self, key: tuple[bytes, int], payload: Payload, digest: bytes, *, early: bool) -> None:
        plan, part = key
        self._undecided[plan][part] = payload
        self._digests[key] = digest
        if early:
            self._early.add(key)
        else:
            self._early.discard(key)

    def _save(
        self, plan: bytes, part: int, payload: Payload, take: Callable[[Payload], Payload] | None, held: bytes | None
    ) -> tuple[Payload, bytes]:
        """What is kept, and its digest. What is `held` is on disk already, perhaps secured, as a copy of it would not be."""
        if take is not None:
            payload = take(payload)
        digest = digest_of(payload)
        if digest != held:
            self._storage.save_mean(plan, part, payload)
        return payload, digest

    def confirm(self, plan: bytes) -> None:
        """Early means of the plan, those that are still to come included, are as good as others: they may be reported, and stay."""
        self._confirmed.add(plan)

    async def get(self, plan: bytes, part: int, digest: bytes) -> Payload | None:
        """The mean with this digest, when it is here."""
        payload = self._undecided.get(plan, {}).get(part)
        if payload is not None and self._digests[plan, part] == digest:
            return payload
        return await self._aside(self._storage.load_mean, plan, part, digest)

    async def pass_by(self, plan: bytes) -> None:
        """The plan is committed, and state that is being downloaded was brought over it. More of that state may have to be: means of the last such plans stay on
        disk, and nothing of them in memory, for there may be any number of them until the download ends."""
        self._undecided.pop(plan, None)
        if plan not in {*self._passed, *self._committed}:
            self._passed.append(plan)
        while len(self._passed) > KEPT_ROUNDS:
            over = self._passed.popleft()
            self._forget_digests(over)
            await self._aside(self._storage.drop_means, over)

    def decide(self, plan: bytes) -> None:
        """The plan is committed and applied, or came with a downloaded state."""
        self._undecided.pop(plan, None)
        if plan in self._passed:
            self._passed.remove(plan)
        self._protected.discard(plan)
        self._confirmed.discard(plan)
        self._early = {key for key in self._early if key[0] != plan}
        self._committed.append(plan)
        while len(self._committed) > KEPT_ROUNDS:
            self._forget_digests(self._committed.popleft())

    async def discard(self, plan: bytes) -> None:
        """Nothing can come of the plan any more."""
        self._protected.discard(plan)
        self._confirmed.discard(plan)
        if self._undecided.pop(plan, None) is not None:
            self._forget_digests(plan)
            await self._aside(self._storage.drop_means, plan)

    def protect(self, plan: bytes) -> None:
        """A plan that we voted for before a restart: its means stay on disk until it is decided."""
        self._protected.add(plan)

    def _forget_digests(self, plan: bytes) -> None:
        for key in [key for key in self._digests if key[0] == plan]:
            del self._digests[key]
            self._early.discard(key)

    def needed(self) -> set[bytes]:
        """Plans whose means must stay on disk after a checkpoint."""
        return {*self._undecided, *self._protected, *self._committed, *self._passed}
