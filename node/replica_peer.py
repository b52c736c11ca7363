"""A peer that holds the whole model: it trains and evaluates by itself."""

from functools import partial

from farflung.node.evaluator import Extent
from farflung.node.facilities import Facilities
from farflung.node.learner import WholeLearner
from farflung.node.peer import Peer
from farflung.node.replica_trainer import ReplicaTrainer
from farflung.node.terms import Terms


class ReplicaPeer(Peer):
    """See the module."""

    def __init__(self, terms: Terms, facilities: Facilities, learner: WholeLearner) -> None:
        door = facilities.doors.learner
        make_trainer = partial(ReplicaTrainer, facilities.signer.peer_id, learner, door, facilities.log, terms.pace)

        async def evaluate(extent: Extent) -> float:
            return await door.run(learner.evaluate if extent is Extent.WHOLE else learner.evaluate_few)

        super().__init__(terms, facilities, learner, make_trainer=make_trainer, evaluate=evaluate)
