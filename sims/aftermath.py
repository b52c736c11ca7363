"""What only the logs of a simulation show to be broken, when it is over: where thousands are searched (`fuzzing`, `soak`) it counts as what the judge sees does.

`sim run` says the same of one scenario, with its peers' names.
"""

from collections.abc import Sequence

from farflung.sims.facts import PeerFacts, RunFacts
from farflung.sims.logs import Logs
from farflung.sims.sim_folder import timeline_of
from farflung.sims.simulation import Report
from farflung.sims.summary import broken_in
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.witness import Witness


def add_what_logs_show(report: Report, witness: Witness, keys: Sequence[str], *, lossy: bool = False) -> None:
    """To the violations of a simulation whose log `witness` has seen, unless there are some already: of a run that a judge has stopped logs are cut off.
    `keys`: public keys in hex, by the peer's number; `lossy`: whether messages are lost all the time.
    """
    if report.violations:
        return
    run = RunFacts(
        name="",
        started=START_UNIX_S,
        ended=START_UNIX_S + report.seconds,
        peers=[PeerFacts(peer=key, name=f"peer {number}") for number, key in enumerate(keys)],
        timeline=timeline_of([(START_UNIX_S + fault.at, fault) for fault in report.faults], keys),
        lossy=lossy,
    )
    report.violations += broken_in(Logs(events=witness.events, run=run))
