"""What a report says of a pipeline: its steps, its routes, who served which stage, and what was taken over from whom, and why."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from farflung.sims import markup
from farflung.sims.markup import Markup, text
from farflung.sims.pipeline_log import LoggedStep
from farflung.sims.plots import human_bytes
from farflung.sims.plots_pipeline import plot_stages, plot_step_seconds, plot_steps
from farflung.sims.plots_routes import MOST_ROUTES, places_told, plot_routes, shown_step
from farflung.sims.scene import Scene
from farflung.sims.svg import SERIES

MOST_TROUBLED = 60
"""Steps with trouble that are told one by one."""


def pipeline_sections(scene: Scene) -> list[Markup]:
    """Nothing for a swarm without a pipeline."""
    if not scene.steps:
        return []
    letters = trouble_letters(scene.steps)
    step = shown_step(scene)
    more = f" The first {MOST_ROUTES} of {len(step.routes)} are drawn." if len(step.routes) > MOST_ROUTES else ""
    return [
        markup.section(
            "Steps of the pipeline",
            "A few steps, stage by stage. Bars are what a peer computed, with the microbatch's number; pale ones are forwards, solid ones backwards, dark ones "
            "the head and the loss. Below them, what it had on its way to other peers. Grey: it was there, and idle.",
            markup.wide(plot_steps(scene)),
            markup.legend([(f"--series-{n}", f"microbatch {n - 1}") for n in range(1, len(SERIES) + 1)]),
            markup.note("Colours repeat from the ninth microbatch on."),
        ),
        markup.section(
            "Routes",
            f"Where the microbatches of step {step.number} went: dots are peers with the number of their stage, colours are microbatches, dashed "
            f"the way home to the loss. Gradients come back the same way.{more} {places_told(scene)}".strip(),
            markup.wide(plot_routes(scene)),
        ),
        markup.section(
            "Peers of each stage",
            "How many served it when. Red: nobody, so that no step could be planned with it.",
            markup.wide(plot_stages(scene)),
        ),
        markup.section(
            "Seconds of each step",
            "From its beginning until the last microbatch was home. Crosses are steps in which something went wrong; their letters are below.",
            markup.wide(plot_step_seconds(scene, letters)),
            _trouble(scene, letters),
        ),
        *_begun_anew(scene),
    ]


def pipeline_tiles(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """For the top of the page."""
    found = figures["pipeline"]
    if found is None:
        return []
    shares = [100.0 * share for share in found["computed"].values()]
    lost = f"{found['rerouted']} rerouted, {found['cut']} cut short"
    return [
        (f"{found['median_step_s']:.2f} s", f"median step of the pipeline; {found['steps']:,} steps", ""),
        (f"{min(shares):.0f} to {max(shares):.0f} %", "of a step its peers computed, by stage", ""),
        (f"{found['microbatches']:,}", f"microbatches came home; {lost}", "" if not found["cut"] else "bad"),
        *_shadow_tile(figures["shadows"]),
    ]


def _shadow_tile(found: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    if found is None:
        return []
    share = "" if found["percent_of_sent"] is None else f", {found['percent_of_sent']:.2f} % of all that was sent"
    return [(human_bytes(found["bytes"]), f"of copies of other stages; {found['refreshes']:,} times{share}", "")]


def _begun_anew(scene: Scene) -> list[Markup]:
    """How lost stages came back; nothing where none was lost."""
    if not scene.figures["recoveries"]:
        return []
    headings = [
        *("stage", "lost at", "agreed after", "by", "made of", "bytes", "fetched in", "computes again after", "steps"),
        *("expected to cost", "trials"),
    ]
    found = scene.figures["recoveries"]
    rows = [_recovery_row(scene, one) for one in found]
    notes = [said for one in found for said in (one["why"], *(f"no {why}" for why in one["failed"]), one["trial"])]
    return [
        markup.section(
            "Stages that were lost",
            "All peers of a stage were gone, and somebody began it anew. Steps are those of the pipeline as they were before, without the time that fetching took; what it was expected to cost is "
            "with the iterations that the stage then lags behind. Trials are the steps in which data nodes tried it before it counted.",
            markup.table(headings, rows, numbers=frozenset({0, 1, 2, 5, 6, 7, 8, 9, 10})),
            *[markup.note(said) for said in notes if said],
        )
    ]


def _recovery_row(scene: Scene, one: Mapping[str, Any]) -> list[Markup]:
    """Of a line of `pipeline_recoveries.told`."""
    untold = "nothing: it is not back" if one["founder"] in scene.events else "not known: its log is missing"
    made = one["rung"] or untold
    if one["misfit"] is not None:
        made += f" (error {one['misfit']:.2f} of that without it)"
    if one["ends"]:
        made += f"; embedding and head {one['ends']}"
    agreed_after = None if one["lost_s"] is None else one["anew_s"] - one["lost_s"]
    return [
        text(str(one["stage"])),
        text(_seconds(one["lost_s"])),
        text(_seconds(agreed_after)),
        text(scene.names.get(one["founder"], one["founder"][:12])),
        text(made),
        text(human_bytes(one["bytes"])),
        text(_seconds(one["transfer_s"])),
        text(_seconds(one["seconds"])),
        text("" if one["iterations"] is None else f"{one['iterations']:.1f}"),
        text(_seconds(one["expected_s"])),
        text(str(one["trials"])),
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def trouble_letters(steps: list[LoggedStep]) -> dict[str, str]:
    """A letter for each distinct reason, in the order in which they came."""
    reasons = list(dict.fromkeys(reason for step in steps for reason in step.trouble))
    return {
        reason: chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
        for number, reason in enumerate(reasons)
    }


def _trouble(scene: Scene, letters: Mapping[str, str]) -> Markup:
    troubled = [step for step in scene.steps if step.trouble]
    if not troubled:
        return markup.note("Nothing went wrong in any step.")
    counts = Counter(reason for step in troubled for reason in step.trouble)
    rows = [[text(letters[reason]), text(f"{count:,}"), text(reason)] for reason, count in counts.most_common()]
    shown = markup.table(["", "steps", "in which"], rows, numbers=frozenset({1}), narrow=True)
    each = [
        [
            text("".join(letters[reason] for reason in step.trouble)),
            text(str(step.number)),
            text(f"{step.seconds:.2f}"),
            text(takeovers_told(step, scene.names)),
        ]
        for step in troubled[:MOST_TROUBLED]
    ]
    listed = markup.table(["", "step", "seconds", "what was done"], each, numbers=frozenset({1, 2}))
    title = "Each of them" if len(troubled) <= MOST_TROUBLED else f"The first {MOST_TROUBLED} of them"
    return Markup(shown + markup.folded(title, listed))


def takeovers_told(step: LoggedStep, names: Mapping[str, str]) -> str:
    """What data nodes did about what went wrong in a step, a sentence."""

    def name(peer: str) -> str:
        return names.get(peer, peer[:12])

    said = [f"{name(one.peer)} was lost: {one.reason}" for one in step.takeovers if one.what == "lost"]
    noted = {one.peer for one in step.takeovers if one.what == "lost"}
    said += [f"what {name(peer)} summed up does not count" for peer in step.lost if peer not in noted]
    taken: dict[str, list[int]] = {}
    for one in step.takeovers:
        if one.what == "rebound":
            taken.setdefault(one.peer, []).append(one.microbatch)
    for peer, microbatches in taken.items():
        said.append(f"{name(peer)} took over {_numbers(microbatches)}")
    for what, verb in (("dropped", "left a stage out"), ("cut", "cut short")):
        found = [one for one in step.takeovers if one.what == what]
        if found:
            said.append(f"{_numbers([one.microbatch for one in found])} {verb}: {found[0].reason}")
    return "; ".join(dict.fromkeys(said))


def _numbers(microbatches: list[int]) -> str:
    numbers = sorted(set(microbatches))
    return f"microbatch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
