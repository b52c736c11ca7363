"""The demo on the terminal: a table of nodes that moves while they train, or plain lines where there is no terminal."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from farflung.node.live import STATE_STYLES, duration, redraws, size, sparkline
from farflung.sims.demonodes import DemoNode
from farflung.sims.summary import checked, violations

NEWS = 6
"""Lines of news under the table."""

BETTER = {True: " (the swarm's is lower)", False: " (the swarm's is NOT lower)", None: ""}
"""By `outer_better`."""

EQUAL = {True: "yes", False: "NO", None: "there was nothing to compare"}
"""By `digests_equal`."""

PLAIN_S = 10.0
"""Between two lines of progress where there is no terminal."""


class Scenery(Protocol):
    """What the view shows."""

    @property
    def nodes(self) -> list[DemoNode]: ...

    @property
    def news(self) -> list[str]: ...

    @property
    def outer_losses(self) -> list[float]: ...

    @property
    def progress(self) -> str:
        """One line: phase and how far."""


class DemoView:
    """Draws a scenery; `update` is called often and draws now and then."""

    def __init__(self, scenery: Scenery, console: Console | None) -> None:
        """`console` None shows nothing."""
        self._scenery = scenery
        self._console = console
        self._began = time.monotonic()
        self._printed = float("-inf")
        self._told = 0

    @property
    def is_live(self) -> bool:
        return self._console is not None and redraws(self._console)

    def render(self) -> Panel:
        """The whole picture."""
        scenery = self._scenery
        table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
        for heading in ("node", "what", "state"):
            table.add_column(heading, no_wrap=True)
        for heading in ("round", "step", "loss", "tokens/s", "peers", "sent"):
            table.add_column(heading, justify="right", no_wrap=True)
        for node in scenery.nodes:
            state = "killed" if node.killed else node.status.state
            style = "bold red" if node.killed else STATE_STYLES.get(state, "yellow")
            loss = node.status.loss
            table.add_row(
                node.name,
                node.role,
                Text(state, style=style),
                str(node.status.version),
                str(node.status.step),
                "" if loss is None else f"{loss:.3f}",
                f"{node.status.tokens_per_s:,.0f}",
                str(node.status.peers),
                size(node.status.sent_bytes),
            )
        losses = scenery.outer_losses
        held_out = Text("swarm's held-out loss  ")
        if losses:
            held_out.append(f"{losses[-1]:.3f}  ", style="bold green").append(sparkline(losses), "green")
        else:
            held_out.append("none yet", style="dim")
        elapsed = duration(time.monotonic() - self._began)
        head = Text(f"{scenery.progress} · {elapsed}", style="bold")
        news = [Text(line, style="dim") for line in scenery.news[-NEWS:]]
        return Panel(
            Group(head, Text(), table, Text(), held_out, Text(), *news),
            title=Text("farflung demo", style="bold"),
            title_align="left",
        )

    def update(self, draw: Callable[[Panel], Any] | None = None) -> None:
        """Draw the picture, or print what is new."""
        if self._console is None:
            return
        if draw is not None:
            draw(self.render())
            return
        for line in self._scenery.news[self._told :]:
            self._print(line)
        self._told = len(self._scenery.news)
        if time.monotonic() - self._printed >= PLAIN_S:
            self._printed = time.monotonic()
            losses = self._scenery.outer_losses
            outer = f"held-out loss {losses[-1]:.3f}" if losses else "no held-out loss yet"
            self._print(f"{self._scenery.progress} · {outer}")

    def finish(self, figures: Mapping[str, Any], report: str, model: str, sample: str) -> None:
        """The figures as a table, and where everything lies."""
        if self._console is None:
            return
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="dim")
        table.add_column()
        sent = figures["bytes_sent_per_peer"]
        most = max(sent.values(), default=0)
        times = f" ({figures['ddp_bytes_per_peer'] / most:,.0f} times as much)" if most else ""
        rows = [
            ("held-out loss of the swarm", f"{figures['outer_loss']:.4f}"),
            ("of the best worker alone", f"{figures['solo_loss']:.4f}{BETTER[figures['outer_better']]}"),
            ("sent by the busiest peer", size(most)),
            ("data-parallel training would send", size(figures["ddp_bytes_per_peer"]) + times),
            ("rounds committed", str(figures["rounds_committed"])),
            ("times a peer missed a round", str(len(figures["rounds_missed"]))),
            ("model's bits equal on all peers", EQUAL[figures["digests_equal"]]),
            (
                "samples trained twice, lost, miscounted",
                f"{figures['samples_trained_twice']}, {figures['samples_lost']}, {figures['samples_miscounted']}",
            ),
            ("peers killed, joined on the way", f"{figures['peers_killed']}, {figures['peers_joined']}"),
            ("messages refused, not just late", str(sum(one["times"] for one in figures["refused"]))),
            ("invariants found broken", str(len(violations(figures)))),
            ("took", duration(figures["seconds"])),
        ]
        for what, value in rows:
            table.add_row(what, value)
        self._console.print()
        self._console.print(table)
        self._print(f"\n{checked(figures)}")
        self._console.print(f"\n[dim]the model writes:[/dim]\n{_plain(sample)}", highlight=False)
        self._print(f"\nreport: {report}\nmodel:  {model}")

    def _print(self, line: str) -> None:
        assert self._console is not None
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
