"""The peers as people see them: in files, and on terminals of some widths."""

import io

import pytest
from rich.console import Console

from farflung.node.peer_table import print_peers
from farflung.node.status import PeerStatus

PEER = "12" * 32
FAR = PeerStatus(
    peer="34" * 32,
    state="suspect",
    member=True,
    device="NVIDIA GeForce RTX 4090",
    step=2999,
    version=120,
    tokens_per_s=41_234.0,
    carrier="tls",
    up_bytes_per_s=12.3e6,
    down_bytes_per_s=1e6,
    downlink_bytes_per_s=9e6,
    sent_bytes=123_456_789,
    received_bytes=98_765_432,
    last_seen_s=75.0,
)
HERE = PeerStatus(peer=PEER, state="self", member=True, step=3000, version=121, device="cpu", tokens_per_s=950.0)
FACTS = (
    "2,999",
    "120",
    "41,234",
    "12.3 MB/s",
    "1.0 MB/s",
    "9.0 MB/s",
    "123.5 MB",
    "98.8 MB",
    "1 min 15 s ago",
    "received",
)


def printed(peers: list[PeerStatus], width: int | None = None) -> str:
    """On a terminal of this width; None: in a file."""
    console = Console(
        file=io.StringIO(), force_terminal=width is not None, width=width, color_system=None, _environ={"TERM": "xterm"}
    )
    print_peers(peers, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_in_a_file_and_on_a_wide_terminal_a_peer_is_a_line() -> None:
    text = printed([FAR, HERE])
    _, here, far = text.splitlines()
    assert here.startswith(PEER[:12]) and far.startswith("343434343434")
    assert all(fact in text for fact in (*FACTS, "NVIDIA GeForce RTX 4090", "its downlink at least 9.0 MB/s"))
    assert printed([FAR, HERE], 240).split() == text.split()


@pytest.mark.parametrize("width", [80, 60])
def test_on_a_narrow_terminal_there_are_two_tables_and_no_number_is_cut(width: int) -> None:
    text = printed([FAR, HERE], width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    of_peers, links = text.split("\n\n")
    assert of_peers.count("343434343434") == links.count("343434343434") == 1
    joined = " ".join(text.split())
    folded = ("12.3 MB/s", "1.0 MB/s", "9.0 MB/s")  # in the column of links, beside others
    assert all(fact in joined for fact in FACTS if fact not in folded)
    assert all(fact.split()[0] in joined for fact in folded)


def test_on_one_that_is_too_narrow_for_those_lines_are_longer_than_it() -> None:
    text = printed([FAR, HERE], 20)
    assert "…" not in text and all(
        fact in text for fact in ("2,999", "41,234", "123.5 MB", "98.8 MB", "1 min 15 s ago")
    )


def test_peers_of_all_stages_are_a_table() -> None:
    peers = [
        PeerStatus(peer="56" * 32, state="alive"),  # on its way in
        PeerStatus(peer="34" * 32, state="suspect", member=True, stage=1, version=3, forward_s=0.25),
        PeerStatus(
            peer="78" * 32,
            state="alive",
            member=True,
            stage=0,
            region="iowa",
            owner="ann",
            tokens_per_s=900.0,
            uplink_bytes_per_s=2.5e6,
            downlink_bytes_per_s=9e6,
        ),
        PeerStatus(peer=PEER, state="self", member=True, stage=1, device="cpu"),
    ]
    lines = printed(peers).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [PEER[:12], "787878787878", "343434343434", "565656565656"]
    assert "900 tokens/s" in lines[2] and "its uplink 2.5 MB/s, its downlink at least 9.0 MB/s" in lines[2]
    assert "iowa, ann" in lines[2]
    assert "0 B" not in lines[1] and lines[2].count("0 B") == 2  # nobody sends anything to itself
    assert lines[3].split()[1:5] == ["1", "suspect", "0", "3"] and "forward 250 ms" in lines[3]
    assert "none yet" in lines[4] and "alive, no member" in lines[4]
    alone = printed([PeerStatus(peer=PEER, state="self")])
    assert "stage" not in alone and "where, whose" not in alone
