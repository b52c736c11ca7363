"""Our recovery in a replica-free pipeline: shadows at peers of other stages, refreshed within a budget, and the ladder.

All decisions are `training`'s: where shadows lie, when they are refreshed, what a lost stage comes back by. A peer
that is lost takes the shadows that it held with it; the peer that takes its place holds none until the next refresh.
The ladder counts in seconds of the modelled swarm: sizes are scaled to a stage of the published model, and links are
those of the clock.
"""

import copy
from collections import Counter

from torch import Tensor

from farflung.compression.codec import Codec
from farflung.compression.hashing import random_seed
from farflung.compression.registry import parse_codec
from farflung.node.shadows import FIRST, WHOLE
from farflung.sims.recovery_keepers import WEIGHTS, Sent, pipeline_nbytes
from farflung.sims.recovery_methods import Method
from farflung.sims.recovery_pipeline import Part, Pipeline
from farflung.sims.recovery_tiers import Tier
from farflung.training.recovery_checkfree import made, rule
from farflung.training.recovery_costs import Rung, Setbacks, per_iteration
from farflung.training.recovery_fit import Fit
from farflung.training.recovery_ladder import Loss, Offer, decide, rebuilt
from farflung.training.recovery_places import Peer, Piece, places
from farflung.training.recovery_refresh import Kept, due, filled
from farflung.training.recovery_rules import drawn, interpolated
from farflung.training.recovery_shadow import NAME_NBYTES, empty, handed_over, refresh, seeded

ENDS_COPIES = 2
FIT = Fit()

Place = tuple[int, str]
"""A part of the pipeline, the ends behind the stages, and the peer that has a shadow of it."""


class Ladder:
    """A keeper, see `recovery_keepers`."""

    def __init__(self, method: Method, pipeline: Pipeline, *, rate: float, seed: int) -> None:
        tier = pipeline.tier
        self._method, self._tier, self._rate, self._seed = method, tier, rate, seed
        self.sent, self.rungs = Sent(), Counter[str]()
        self._codec, self._budget, self._bucket = parse_codec(method.codec), method.budget, 0.0
        sizes = [part.flat.numel() for part in pipeline.stages]
        sizes[0] += pipeline.ends.flat.numel()
        peers = [
            Peer(
                name=_name(stage),
                stage=stage,
                domains=(region, f"network {stage}", f"owner {stage}"),
                room_bytes=2 * 4 * max(sizes),
                uplink_bytes_s=tier.clock.link_bytes_s,
            )
            for stage, region in enumerate(tier.regions)
        ]
        pieces = [
            Piece(name=_piece(tier, number), stage=number % tier.stages, nbytes=4 * part.flat.numel(), copies=copies)
            for number, part in enumerate(pipeline.parts)
            for copies in [ENDS_COPIES if number == tier.stages else 1]
        ]
        held, missing = places(peers, pieces, tier.stages)
        assert not missing, missing
        self._holders = {
            number: [one.holder for one in held if one.piece == piece.name] for number, piece in enumerate(pieces)
        }
        self._shadows = {
            (number, holder): seeded(pipeline.parts[number].flat)
            for number, holders in self._holders.items()
            for holder in holders
        }
        self._detached: set[Place] = set()
        self._ends = pipeline.ends.flat.clone()

    def copy(self, method: Method, pipeline: Pipeline, rate: float) -> "Ladder":
        """Another one, of a copy of the pipeline, that has the same shadows if the method has any.

        Its bytes count from here, and so does its budget."""
        other = copy.copy(self)
        other._method, other._rate = method, rate
        other._codec, other._budget = parse_codec(method.codec), method.budget
        other._shadows = dict(self._shadows) if method.shadows else {}
        other._bucket = min(0.0, self._bucket)
        other._detached, other._ends = set(self._detached), pipeline.ends.flat.clone()
        other.sent, other.rungs = Sent(), Counter[str]()
        return other

    def after_step(self, pipeline: Pipeline, step: int) -> None:
        """Refresh what is due; without shadows the ends' exact copy, as CheckFree's neighbours keep it, if they can be lost."""
        if not self._method.shadows and self._tier.safe_ends:
            return
        if not self._method.shadows:
            self._ends = pipeline.ends.flat.clone()
            self.sent.kept += WEIGHTS.max_nbytes(self._ends.numel())
            return
        places = [(number, holder) for number, holders in self._holders.items() for holder in holders]
        kept = [self._kept(place, pipeline.parts[place[0]]) for place in places]
        self._bucket = filled(self._bucket, pipeline_nbytes(self._tier), kept, self._budget)
        refreshes, self._bucket = due(
            kept,
            step,
            bucket_bytes=self._bucket,
            loss_per_step=per_iteration(self._rate, self._tier.clock.iteration_s),
            budget=self._budget,
        )
        for one in refreshes:
            place = places[kept.index(one.kept)]
            state = pipeline.parts[place[0]].flat
            base = self._shadows[place] if self._continues(place) else empty(state.numel())
            sent, self._shadows[place] = refresh(base, state, step, self._codec_for(place))
            self._detached.discard(place)
            self._bucket += one.kept.nbytes - sent.nbytes  # what was expected, and what it came to
            self.sent.kept += sent.nbytes

    def recover(self, pipeline: Pipeline, lost: frozenset[int], step: int) -> None:
        """Down the ladder for each stage."""
        gone = {_name(stage) for stage in lost}
        self._shadows = {place: one for place, one in self._shadows.items() if place[1] not in gone}
        survivors = {stage: vector.clone() for stage, vector in pipeline.survivors(lost).items()}
        norms = {stage: pipeline.stages[stage].norm for stage in survivors}
        for stage in sorted(lost):
            if stage == 0 and not self._tier.safe_ends:
                self._bring_back_ends(pipeline, step)
            rung = self._choose(stage, pipeline.stages[stage].flat.numel(), lost, step)
            self.rungs[rung] += 1
            if rung is Rung.SHADOW:
                pipeline.replace(stage, self._hand_over(stage), bump=False)
                continue
            if rung in (Rung.MEAN, Rung.FITTED):
                how = rule(self._method.checkfree, stage, len(pipeline.stages), lost)
                vector = made(how, survivors, norms)
            elif rung is Rung.INTERPOLATION:
                vector = interpolated(survivors, stage)
            else:
                assert rung is Rung.RANDOM, rung
                vector = drawn(self._tier.model, self._tier.layers, random_seed(self._seed, stage, step))
            pipeline.replace(stage, vector, bump=rung.bumps_lr)
            self._detached |= {place for place in self._shadows if place[0] == stage}
            sources = 2 if rung.bumps_lr else 0
            self.sent.recovered += sources * WEIGHTS.max_nbytes(vector.numel())
            if rung is Rung.FITTED:
                pipeline.fit(stage, FIT)

    def close(self) -> None:
        """Nothing runs."""

    def _bring_back_ends(self, pipeline: Pipeline, step: int) -> None:
        ends = self._tier.stages
        if not self._method.shadows:
            pipeline.replace_ends(self._ends)
            self.sent.recovered += WEIGHTS.max_nbytes(self._ends.numel())
        elif self._freshest(ends) is not None:
            pipeline.replace_ends(self._hand_over(ends))
        else:
            pipeline.draw_ends(random_seed(self._seed, ends, step))
            self.rungs["ends anew"] += 1

    def _hand_over(self, number: int) -> Tensor:
        """Give the new peer the freshest shadow. It does not know other holders' to the bit, so their next refresh is whole."""
        place = self._freshest(number)
        assert place is not None
        sent, shadow = handed_over(self._shadows[place], WHOLE)
        self._shadows[place] = shadow
        self._detached |= {other for other in self._shadows if other[0] == number and other != place}
        self.sent.recovered += sent.nbytes
        return shadow.values

    def _freshest(self, number: int) -> Place | None:
        there = [place for place in self._shadows if place[0] == number]
        return max(there, key=lambda place: self._shadows[place].step, default=None)

    def _kept(self, place: Place, part: Part) -> Kept:
        setbacks, stage = Setbacks(), place[0] % self._tier.stages
        missing = Rung.RANDOM if place[0] == self._tier.stages else Rung.MEAN
        return Kept(
            piece=_piece(self._tier, place[0]),
            holder=place[1],
            step=self._shadows[place].step if place in self._shadows else None,
            nbytes=NAME_NBYTES + self._codec_for(place).expected_nbytes(part.flat.numel()),
            replicas=1,
            setback_per_step=setbacks.per_step(stage),
            missing_setback=setbacks.iterations(missing, stage=stage, steps_behind=0, failures_per_hour=self._rate),
        )

    def _codec_for(self, place: Place) -> Codec:
        return self._codec if self._continues(place) else FIRST

    def _continues(self, place: Place) -> bool:
        return place in self._shadows and place not in self._detached

    def _choose(self, stage: int, numel: int, lost: frozenset[int], step: int) -> Rung:
        clock = self._tier.clock
        scale = clock.stage_parameters / numel
        offers = rebuilt(
            stage,
            self._tier.stages,
            lost,
            [_name(other) for other in range(self._tier.stages)],
            weights_nbytes=4 * clock.stage_parameters,
            bytes_s=clock.link_bytes_s,
            swaps=False,
            boundary_nbytes=round(scale * pipeline_nbytes(self._tier) / self._tier.stages),
            fit_s=FIT.steps * clock.iteration_s / self._tier.stages,
        )
        place = self._freshest(stage)
        if place is not None:
            offers.append(
                Offer(
                    rung=Rung.SHADOW,
                    holders=(place[1],),
                    nbytes=round(scale * WHOLE.max_nbytes(numel)),
                    bytes_s=clock.link_bytes_s,
                    steps_behind=step - self._shadows[place].step,
                )
            )
        happened = Loss(stage=stage, iteration_s=clock.iteration_s, failures_per_hour=self._rate, may_skip=stage > 0)
        order = [priced.offer.rung for priced in decide(happened, offers).order]
        return self._method.forced if self._method.forced in order else order[0]


def _name(stage: int) -> str:
    return f"peer {stage}"


def _piece(tier: Tier, number: int) -> str:
    return "ends" if number == tier.stages else f"stage {number}"
