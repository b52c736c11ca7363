"""What a node answers about samples: the ledger of its last commit, and what the commits that it keeps tell of one sample."""

from farflung.node.status import LedgerStatus, SamplesOf, SampleStatus, SampleStop
from farflung.protocol.history import History
from farflung.protocol.ledger import count, num_trained, trace, trained_by


def ledger_status(history: History, *, swarm: str, num_samples: int, lease: int, sample: int | None) -> LedgerStatus:
    """`num_samples`: of one epoch; `lease`: versions for which a vanished peer keeps its own; `sample`: whose ways are told as well.

    `history` must have begun.
    """
    head, pages = history.head.commit, history.pages()
    ledger = head.ledger
    epoch = ledger.cursor // num_samples
    begin = epoch * num_samples
    return LedgerStatus(
        swarm=swarm,
        height=head.height,
        version=head.version,
        num_samples=num_samples,
        epoch=epoch,
        cursor=ledger.cursor,
        trained=num_trained(ledger, 0, ledger.cursor),
        epoch_handed_out=ledger.cursor - begin,
        epoch_trained=num_trained(ledger, begin, ledger.cursor),
        earlier_left=begin - num_trained(ledger, 0, begin),
        held=[
            SamplesOf(peer=h.peer.hex(), samples=count(h.intervals), intervals=list(h.intervals)) for h in ledger.held
        ],
        free=list(ledger.free),
        suspended=[
            SamplesOf(
                peer=s.peer.hex(),
                samples=count(s.intervals),
                intervals=list(s.intervals),
                until_version=s.version + lease,
            )
            for s in ledger.suspended
        ],
        since_height=pages[0].height,
        trained_by={peer.hex(): num for peer, num in sorted(trained_by(pages).items())},
        sample=None
        if sample is None
        else SampleStatus(
            number=sample,
            epoch=sample // num_samples,
            stops=[
                SampleStop(height=height, state=place.state, peer=None if place.peer is None else place.peer.hex())
                for height, place in trace(pages, sample)
            ],
        ),
    )
