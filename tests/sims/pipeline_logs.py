"""Logs of a pipeline of four peers, written by hand: two steps, of which one loses a peer."""

from typing import Any

from farflung.sims.facts import PeerFacts, RunFacts
from farflung.sims.scene import Scene

START = 1_700_000_000.0
HOME, LEFT, RIGHT, SPARE = (bytes([17 * number] * 32).hex() for number in (1, 2, 3, 4))


def step(peer: str, stage: int, at: float, **fields: Any) -> dict[str, Any]:
    """A `pipeline.step` whose step ended `at` seconds after START."""
    nothing = {"landed": 0, "cut": 0, "lost": [], "visits": 0, "peers": [1, 2], "ops": [], "sent": [], "notes": []}
    known = {"time": START + at, "event": "pipeline.step", "swarm": "s", "peer": peer, "stage": stage}
    return known | {"height": 0, "version": 0, "step": 0, "number": 0, "coordinator": HOME} | nothing | fields


def by_hand() -> dict[str, list[dict[str, Any]]]:
    """Two microbatches through two stages; the second step loses one of two peers of stage 1 after its forward."""
    home = [
        step(
            HOME,
            0,
            2.0,
            seconds=2.0,
            landed=2,
            ops=[["F", 0, 0, 0, 100], ["F", 1, 0, 100, 200], ["LOSS", 0, 0, 500, 550], ["B", 0, 0, 1400, 1700]],
            sent=[["F", 0, 1, LEFT[:8], 100, 200], ["F", 1, 1, RIGHT[:8], 200, 310], ["B", 0, 1, LEFT[:8], 550, 650]],
        ),
        step(
            HOME,
            0,
            6.0,
            number=1,
            seconds=3.0,
            landed=1,
            cut=1,
            lost=[RIGHT],
            ops=[["F", 0, 0, 0, 100]],
            sent=[["F", 0, 1, RIGHT[:8], 100, 250]],
            notes=[
                ["lost", -1, RIGHT[:8], f"no stream to {RIGHT[:12]}: connection refused"],
                ["rebound", 0, LEFT[:8], "hop 1 was at peer 2"],
                ["cut", 1, "", "nobody is left for hop 1, stage 1"],
            ],
        ),
    ]
    left = [
        step(LEFT, 1, 1.9, seconds=1.8, ops=[["F", 0, 1, 150, 400], ["B", 0, 1, 600, 1200]]),
        step(LEFT, 1, 6.0, number=1, seconds=2.9, ops=[["F", 0, 1, 900, 1100], ["B", 0, 1, 1200, 1500]], sent=[]),
    ]
    right = [step(RIGHT, 1, 1.9, seconds=1.8, ops=[["F", 1, 1, 250, 500]])]
    return {HOME: home, LEFT: left, RIGHT: right}


def scene_of(events: Any, **facts: Any) -> Scene:
    names = {HOME: "home/0", LEFT: "far/0", RIGHT: "far/1"}
    peers = [PeerFacts(peer=peer, name=name, region=facts.get(name, "")) for peer, name in names.items()]
    return Scene(events=events, run=RunFacts(name="s", started=START, ended=START + 10.0, peers=peers))
