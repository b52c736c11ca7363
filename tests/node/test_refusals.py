"""A flood of refusals does not become a flood of the log."""

import asyncio
import time
from typing import Any

import msgspec

from farflung.node.dht import key_digest
from farflung.node.discovery import check_record
from farflung.node.events import EventLog
from farflung.node.live import line as said
from farflung.node.refusals import MOST, STRETCH_S, Refusals
from farflung.protocol.errors import MAX_REASON, Malformed, Refused, RemoteError
from farflung.protocol.manifest import SignedManifest
from farflung.protocol.records import MANIFEST_SUBKEY, manifest_key
from farflung.protocol.versions import PROTOCOL_VERSION
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


def test_what_a_stranger_sent_neither_controls_the_terminal_nor_fills_it() -> None:
    """The name of a field that is none of ours is told as it came: a line of a step could be forged by it."""
    forged = "\x1b]0;owned\x07\x1b[2J\n12:00:00 step 9 loss 0.0\u202e\ud7ff" + 7000 * "a"
    signed = SignedManifest(msgspec.msgpack.encode({"protocol_versions": [PROTOCOL_VERSION], forged: 1}), bytes(64))
    lines: list[dict[str, Any]] = []

    async def main() -> None:
        log = EventLog(None, swarm="test", peer="ab", clock=lambda: 0.0)
        log.subscribe(lines.append)
        try:
            check_record(
                key_digest(manifest_key(signed.swarm)), MANIFEST_SUBKEY, signed.encode(), expires_at=time.time() + 60.0
            )
        except RemoteError as error:
            assert str(error).isprintable()
            Refusals(log)(error)

    clock.run(main())
    (refused,) = lines
    assert "owned\\x07\\x1b[2J\\n12:00:00 step 9" in refused["reason"] and len(refused["reason"]) == MAX_REASON
    told = said(refused)
    assert told is not None and told.isprintable()
    assert Malformed("each\n" * MAX_REASON).reason == (MAX_REASON * "each\\n")[:MAX_REASON]
    assert Malformed("what is printable: ä [b] \\n").reason == "what is printable: ä [b] \\n"
