"""A flood of refusals does not become a flood of the log."""

import asyncio
from typing import Any

from farflung.node.events import EventLog
from farflung.node.refusals import MOST, STRETCH_S, Refusals
from farflung.protocol.errors import Malformed, Refused
from farflung.sims import clock


def test_each_is_told_until_there_are_too_many_and_then_how_many_more_there_were() -> None:
    lines: list[dict[str, Any]] = []

    async def main() -> None:
        log = EventLog(None, swarm="test", peer="ab", clock=lambda: 0.0)
        log.subscribe(lines.append)
        refused = Refusals(log)
        for number in range(MOST + 7):
            refused(Malformed(f"nonsense {number}", peer=b"\1" * 32))
        await asyncio.sleep(STRETCH_S)
        refused(Refused("of nobody in particular"))
        refused(Refused("again"))

    clock.run(main())
    assert [line["reason"] for line in lines[:MOST]] == [f"nonsense {number}" for number in range(MOST)]
    assert {(line["error"], line["of"], line["more"]) for line in lines[:MOST]} == {("Malformed", "01" * 32, 0)}
    assert [(line["reason"], line["of"], line["more"]) for line in lines[MOST:]] == [
        ("of nobody in particular", "", 7),
        ("again", "", 0),
    ]
