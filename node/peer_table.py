"""The peers that a node knows, for people: `farflung peers`. One table, or two where a terminal is too narrow for that."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from farflung.node.live import duration, size
from farflung.node.status import PeerStatus

PEER_STYLES = {"self": "bold", "alive": "green", "suspect": "yellow", "dead": "red", "left": "dim"}

UNBOUND = 10_000
"""Columns that no table needs."""


class Column(NamedTuple):
    """What is said of every peer."""

    heading: str
    cell: Callable[[PeerStatus], str | Text]
    """A Text, where it is somebody else's word: no markup is read in it."""
    is_number: bool = False
    """And is not folded, for half a number is another one."""


def print_peers(peers: Sequence[PeerStatus], console: Console) -> None:
    """Nothing is cut: lines to a file or a pipe are as long as they need to be, and so are those for a terminal that is too narrow for two tables as well."""
    peers = in_order(peers)
    of_peer, of_link = peer_columns(peers), LINK_COLUMNS
    tables = [peer_table(peers, of_peer + of_link)]
    needed = _measured(tables[0], console).maximum
    if console.is_terminal and needed > console.width:
        tables = [peer_table(peers, of_peer), peer_table(peers, of_link)]
        needed = max(_measured(table, console).minimum for table in tables)
    console.width = max(console.width, needed)
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)


def in_order(peers: Sequence[PeerStatus]) -> list[PeerStatus]:
    """This node first, then by stage, where there are stages, and by key."""
    last = max((peer.stage or 0 for peer in peers), default=0) + 1  # whoever has no stage yet
    return sorted(peers, key=lambda one: (one.state != "self", last if one.stage is None else one.stage, one.peer))


def peer_columns(peers: Sequence[PeerStatus]) -> tuple[Column, ...]:
    """Of the peers themselves: of stages, and where they stand, only if any says so."""
    columns = list[Column]()
    if any(peer.stage is not None for peer in peers):
        columns.append(Column("stage", lambda one: "none yet" if one.stage is None else str(one.stage), is_number=True))
    if any(peer.region or peer.owner for peer in peers):
        columns.append(Column("where, whose", lambda one: Text(", ".join(filter(None, (one.region, one.owner))))))
    return (
        *columns,
        Column("state", _state),
        Column("device", lambda one: Text(one.device)),
        Column("step", lambda one: f"{one.step:,}", is_number=True),
        Column("version", lambda one: f"{one.version:,}", is_number=True),
        Column("speed", _speed),
    )


def peer_table(peers: Sequence[PeerStatus], columns: Sequence[Column]) -> Table:
    """A row for each peer, which begins with its name."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("peer", no_wrap=True)
    for column in columns:
        if column.is_number:
            table.add_column(column.heading, justify="right", no_wrap=True)
        else:
            table.add_column(column.heading, overflow="fold")
    for one in peers:
        table.add_row(one.peer[:12], *(column.cell(one) for column in columns))
    return table


def _measured(table: Table, console: Console) -> Measurement:
    return Measurement.get(console, console.options.update(width=UNBOUND), table)


def _state(one: PeerStatus) -> Text:
    return Text(one.state if one.member else f"{one.state}, no member", style=PEER_STYLES.get(one.state, ""))


def _speed(one: PeerStatus) -> str:
    """Peers of a stage say how long a forward takes them, those of our own stage what they train as well."""
    said = [f"{one.tokens_per_s:,.0f} tokens/s"] if one.tokens_per_s else []
    return ", ".join([*said, f"forward {1000.0 * one.forward_s:,.0f} ms"] if one.forward_s else said)


def _link(one: PeerStatus) -> str:
    said = [one.carrier] if one.carrier else []
    if one.up_bytes_per_s or one.down_bytes_per_s:
        said.append(f"up {size(one.up_bytes_per_s)}/s, down {size(one.down_bytes_per_s)}/s")
    if one.uplink_bytes_per_s:
        said.append(f"its uplink {size(one.uplink_bytes_per_s)}/s")
    if one.downlink_bytes_per_s:
        said.append(f"its downlink at least {size(one.downlink_bytes_per_s)}/s")
    return ", ".join(said)


def _seen(one: PeerStatus) -> str:
    return "" if one.last_seen_s is None else f"{duration(one.last_seen_s)} ago"


LINK_COLUMNS = (
    Column("link", _link),
    Column("sent", lambda one: "" if one.state == "self" else size(one.sent_bytes), is_number=True),
    Column("received", lambda one: "" if one.state == "self" else size(one.received_bytes), is_number=True),
    Column("seen", _seen, is_number=True),
)
"""Of what goes between a peer and this node."""
