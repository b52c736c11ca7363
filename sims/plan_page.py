"""`docs/planning.md` and its picture: `farflung sim plan` of all networks, beside their baselines and bounds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from farflung.sims import png
from farflung.sims.check import Check, machine
from farflung.sims.outputs import check_outputs
from farflung.sims.pipeline_run import BOUNDS, run_plan
from farflung.sims.plots import WIDTH_IN

PAGE, PICTURE = "planning.md", "planning.png"

NETWORKS = (("reference", 20), ("forty-two", 42), *(("volunteers", peers) for peers in (20, 50, 100, 200)))
"""Name, and peers of those that are drawn."""

MOST_S, WITHIN_CPU_S = 71.5, 60.0
"""Of the reference network's step, and the planning that it may take."""
QUICK_MOST_S, QUICK_WITHIN_CPU_S = 73.5, 10.0
LEAST_REDUCTION, LEAST_ROUTING = 65.0, 20.0
"""Percent off full columns, of plans that skip a third and of plans that skip nothing."""
DIGEST_COLUMNS_S = 204.2
"""Of the reference network in the digest that the goals in percent were set by: 71.5 s are 65 % less."""

BARS = {
    "full_columns_s": ("full columns", "#8f9aa8"),
    "matched_columns_s": ("matched columns", "#b8c0ca"),
    "planned_full_s": ("full, routed by search", "#58a6e0"),
    "cost_blind_skip_s": ("skipping, blind to costs", "#d9b04c"),
    "planned_s": ("skipping, planned", "#c8323a"),
    "lower_bound_s": ("no plan is below", "#5b6470"),
}

Figures = Mapping[str, Any]


def make_page(folder: Path, *, proposals: int | None, seed: int, say: Callable[[str], None]) -> list[Figures]:
    """Plan all networks, write the page and its picture into `folder`, which is made when missing. Raises BadPlan, ConfigError."""
    check_outputs(folders=[folder])
    found: list[Figures] = []
    for number, (name, peers) in enumerate(NETWORKS, start=1):
        say(f"{number} of {len(NETWORKS)}: {name}, {peers} peers")
        found.append(run_plan(name, peers=peers, proposals=proposals, seed=seed, trace=None))
    plot(found, folder / PICTURE)
    (folder / PAGE).write_text("\n".join(_lines(found, seed)) + "\n", encoding="utf-8")
    return found


def checks(reference: Figures) -> list[Check]:
    """What plans of the reference network are held to."""
    step, took = reference["planned_s"], reference["planning_cpu_s"]
    quick, quick_took = reference["quick_planned_s"], reference["quick_planning_cpu_s"]
    return [
        Check(
            target=f"a step of at most {MOST_S} s after {WITHIN_CPU_S:.0f} CPU seconds of planning",
            measured=f"{step:.1f} s after {took:.1f}",
            met=step <= MOST_S and took <= WITHIN_CPU_S,
        ),
        Check(
            target=f"of at most {QUICK_MOST_S} s after {QUICK_WITHIN_CPU_S:.0f}",
            measured=f"{quick:.1f} s after {quick_took:.1f}",
            met=quick <= QUICK_MOST_S and quick_took <= QUICK_WITHIN_CPU_S,
        ),
        *(
            Check(
                target=f"{what} takes {least:.0f} % off full columns",
                measured=f"{reference[key]:.1f} %",
                met=reference[key] >= least,
            )
            for what, least, key in (
                ("skipping a third", LEAST_REDUCTION, "reduction_percent"),
                ("routing alone", LEAST_ROUTING, "routing_percent"),
            )
        ),
    ]


def plot(found: Sequence[Figures], file: Path) -> None:
    """A group of bars for each network. Write the PNG; raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 4.0), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(BARS)
        for number, (key, (label, colour)) in enumerate(BARS.items()):
            places = [at + (number - (len(BARS) - 1) / 2) * width for at in range(len(found))]
            axes.bar(places, [one[key] for one in found], width=0.9 * width, color=colour, label=label)
        axes.set_xticks(range(len(found)), [_name(one) for one in found])
        axes.set_ylabel("seconds of a step")
        axes.legend(ncols=3, loc="upper left")
        axes.set_ylim(top=1.3 * max(one["full_columns_s"] for one in found))
        png.save(figure, file)


def _name(one: Figures) -> str:
    return f"{one['network'].removesuffix(str(one['peers'])).strip()}, {one['peers']}"


def _lines(found: Sequence[Figures], seed: int) -> list[str]:
    reference = found[0]
    return [
        "# Planning: routes of a pipeline beside full columns, and beside what no plan can do better",
        "",
        f"Made by `farflung sim plan --page docs`; do not edit. Machine: {machine()}. Seed {seed}.",
        "",
        "Seconds of a step, all by the same simulator (compute of each peer, links shared, memory for so many microbatches, forward and backward and the loss between). "
        "*reference*: 20 peers in 12 regions, 6 stages, 3 microbatches to a peer, 30 in a step. *forty-two*: 42 peers, 8 stages. *volunteers*: peers of unequal speed, memory and links, drawn at random.",
        "",
        "* *columns*: DT-FM's assignment, full columns by the peers' places in their stages' lists: mean (least to most) of thirty orders.",
        "* *matched*: the same assignment, consecutive stages joined by bottleneck matchings; full columns as good as we can make them.",
        "* *random*: peers dealt to stages at random, then matched: mean of five.",
        "* *full, routed*: nothing is skipped, each microbatch has a route of its own, by search.",
        "* *blind*: routes that skip, feasible and drawn without a look at costs, on DT-FM's assignment; *random feasible* on stages at random.",
        "* *planned*: routes that skip, by search; *quick*: with a tenth of the budget and less.",
        "",
        f"![Steps of all networks]({PICTURE})",
        "",
        "| network | peers | stages | visits | columns | matched | random | full, routed | blind | random feasible | **planned** | CPU s | quick | CPU s | no plan below | with any assignment |",
        "|---|" + "---|" * 15,
        *(_row(one) for one in found),
        "",
        "| network | skipping, off columns | off matched | routing alone, off columns | off matched | plan above its bound |",
        "|---|" + "---|" * 5,
        *(_percents(one) for one in found),
        "",
        BOUNDS.replace("lower_bound_any_assignment_s holds", "*with any assignment* holds").replace(
            "lower_bound_s", "*no plan below*"
        ),
        "",
        "On instances small enough to try every plan (8 peers, 4 stages, 6 microbatches) the search ends above the optimum by "
        + ", ".join(f"{gap:.1f}" for gap in reference["gaps_to_optimum_percent_small"])
        + " %.",
        "",
        "## Goals, for the reference network",
        "",
        "| goal | measured | |",
        "|---|---|---|",
        *(check.line for check in checks(reference)),
        "",
        f"The goals in percent were set beside full columns that take {DIGEST_COLUMNS_S} s ({MOST_S} s are 65 % less), which is what columns take that nobody has matched. Matched ones take a fifth less, and off "
        f"these skipping takes {reference['reduction_from_matched_percent']:.1f} % and routing alone {reference['routing_from_matched_percent']:.1f} %. Next to nothing is left there between the goals and the bounds: no plan, with any assignment, takes more "
        f"than {_most(reference, 'lower_bound_any_assignment_s'):.0f} and {_most(reference, 'full_lower_bound_any_assignment_s'):.0f} % off them.",
    ]


def _most(one: Figures, bound: str) -> float:
    """Percent that a plan at a bound would take off matched columns."""
    return 100.0 * (1.0 - float(one[bound] / one["matched_columns_s"]))


def _row(one: Figures) -> str:
    numbers = (
        *(f"{one[key]:.1f}" for key in ("planned_full_s", "cost_blind_skip_s", "random_feasible_s")),
        f"**{one['planned_s']:.1f}**",
        *(
            f"{one[key]:.1f}"
            for key in (
                "planning_cpu_s",
                "quick_planned_s",
                "quick_planning_cpu_s",
                "lower_bound_s",
                "lower_bound_any_assignment_s",
            )
        ),
    )
    full = f"{one['full_columns_s']:.1f} ({one['full_columns_least_s']:.1f} to {one['full_columns_most_s']:.1f})"
    columns = (full, f"{one['matched_columns_s']:.1f}", f"{one['random_columns_s']:.1f}")
    shape = (_name(one).partition(",")[0], str(one["peers"]), str(len(one["stages"])), str(one["visits"]))
    return f"| {' | '.join((*shape, *columns, *numbers))} |"


def _percents(one: Figures) -> str:
    keys = (
        "reduction_percent",
        "reduction_from_matched_percent",
        "routing_percent",
        "routing_from_matched_percent",
        "gap_percent",
    )
    return f"| {_name(one)} | {' | '.join(f'{one[key]:.1f} %' for key in keys)} |"
