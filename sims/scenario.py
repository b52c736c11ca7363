"""Scenario files: what a simulated swarm is made of, what happens to it, and what must come of it (docs/scenarios.md).

TOML read into structs that check every value when they are made; whatever is wrong is a ConfigError that names the file, the key and the remedy.
The manifest is written with the manifest's own keys (`protocol.manifest_toml`), under `[manifest]`.
"""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from farflung.protocol.checks import check_range, check_text, nearest
from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import MAX_TEXT, MAX_TOML_CHARS
from farflung.sims import regions
from farflung.sims.attacks import Attack
from farflung.sims.costs import Costs
from farflung.sims.happenings import MAX_SECONDS, REJOIN_S, Happening, given
from farflung.sims.nat import Nat
from farflung.sims.traces import read_trace

SHIPPED = Path(__file__).parent / "scenarios"
"""Scenarios that come with farflung."""

SAYS_GOODBYE = 0.3
"""Share of sessions that end with a goodbye, where nobody says another."""

MAX_PEERS = 10_000


class Lasting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long something lasts, drawn anew each time."""

    kind: Literal["exponential", "weibull"] = "exponential"
    mean_s: float
    shape: float = 1.0
    """Of a Weibull distribution, which with 1 is exponential; below 1, whoever has stayed for long stays longer, as volunteers do."""

    def __post_init__(self) -> None:
        check_range("mean_s", self.mean_s, 1.0, MAX_SECONDS)
        check_range("shape", self.shape, 0.1, 10.0)
        if self.kind == "exponential" and self.shape != 1.0:
            raise ConfigError(f'shape = {self.shape}: exponential has none; set kind = "weibull", or leave shape out')


class PeerClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peers that are alike."""

    name: str
    count: int
    tokens_per_s: float
    """How fast one trains the model."""
    memory_gb: float = 0.0
    """Of its device, checked against what the model needs; 0: not checked."""
    up_mbit: float = 20.0
    down_mbit: float = 100.0
    latency_ms: float = 5.0
    """Of its access link, one way: that of both ends is added up, and what lies between their regions."""
    nat: Nat = "none"
    """The router in front of each; see `farflung.sims.nat`."""
    attacks: tuple[Attack, ...] = ()
    """What they do beside what honest nodes do; see `farflung.sims.attacks`."""
    stage: int | None = None
    """Of a pipeline, the stage that they take and stay in; None: one that needs them. The founder holds the first in any case."""
    regions: tuple[str, ...] = ("Belgium",)
    """The peers of the class are spread over these by turns."""
    join_s: tuple[float, float] = (0.0, 0.0)
    """Each joins at a moment between these, uniform."""
    session: Lasting | None = None
    """From joining to going away; none: it stays."""
    absence: Lasting | None = None
    """From going away to coming back, `REJOIN_S` at least; none: it does not come back."""
    says_goodbye: float = SAYS_GOODBYE
    """Share of sessions that end with a goodbye, and not with a kill or a power failure."""
    trace: str = ""
    """In the place of `join_s`, `session` and `absence`: a CSV file beside this one with a line `start_s,end_s,host` for each session."""

    def __post_init__(self) -> None:
        check_text("name", self.name, 64)
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ConfigError(f"name = {self.name!r}: write it with a-z, 0-9 and '-'")
        check_range("count", self.count, 1, MAX_PEERS)
        check_range("tokens_per_s", self.tokens_per_s, 1e-3, 1e12)
        check_range("memory_gb", self.memory_gb, 0.0, 1e5)
        check_range("up_mbit", self.up_mbit, 1e-3, 1e6)
        check_range("down_mbit", self.down_mbit, 1e-3, 1e6)
        check_range("latency_ms", self.latency_ms, 0.0, 10_000.0)
        check_range("says_goodbye", self.says_goodbye, 0.0, 1.0)
        if not self.regions:
            raise ConfigError(f"regions is empty; known are {', '.join(regions.NAMES)}")
        for region in self.regions:
            if region not in regions.NAMES:
                raise ConfigError(
                    f"region {region!r} is unknown{nearest(region, regions.NAMES)}; known are {', '.join(regions.NAMES)}"
                )
        if not 0.0 <= self.join_s[0] <= self.join_s[1] <= MAX_SECONDS:
            raise ConfigError(f"join_s = {list(self.join_s)}: give [first, last] in seconds, 0 or more")
        self.check_given(given(self))
        if self.absence is not None and self.session is None:
            raise ConfigError("absence without session: nobody who stays comes back; give session.mean_s as well")

    def check_given(self, keys: Iterable[str]) -> None:
        """Refuse what somebody wrote to no effect. Raises ConfigError."""
        for key in keys:
            if self.trace and key in ("join_s", "session", "absence"):
                raise ConfigError(f"trace and {key}: give one of them")
            if key == "says_goodbye" and self.session is None and not self.trace:
                raise ConfigError(
                    "says_goodbye without sessions: nobody goes away; give session.mean_s or trace as well"
                )


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the internet does to messages, on top of links and regions."""

    loss: float = 0.0
    """Probability that a control message is lost."""
    duplicate: float = 0.0
    reorder: float = 0.0
    jitter_ms: float = 5.0
    clock_skew_s: float = 0.0
    """Every clock is off by up to so much, uniform."""
    greetings: Literal["sent", "reckoned"] = "sent"
    """Whether each heartbeat is a message, or only those that say something new (`echoes`)."""

    def __post_init__(self) -> None:
        for key in ("loss", "duplicate", "reorder"):
            check_range(key, getattr(self, key), 0.0, 0.9)
        check_range("jitter_ms", self.jitter_ms, 0.0, 10_000.0)
        check_range("clock_skew_s", self.clock_skew_s, 0.0, 3600.0)


class Expect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a run pass. No violation of an invariant is always expected."""

    min_rounds: int = 0
    min_members: int = 0
    """In the view at the end."""
    max_missed_share: float = 1.0
    """Contributions that missed their round, of all that were made."""
    min_training_share: float = 0.0
    """Time that peers trained, of the time that they ran."""
    max_median_round_s: float = MAX_SECONDS
    """From the plan until all members held all means."""
    max_loss: float = 1e9
    """The last held-out loss; needs mode = "real"."""
    max_recovery_iterations: float = 1e9
    """Of a pipeline: steps from the loss of a stage until it computes again, without what fetching it took; some stage must have been lost, and come back."""

    def __post_init__(self) -> None:
        check_range("min_rounds", self.min_rounds, 0, 1 << 53)
        check_range("min_members", self.min_members, 0, MAX_PEERS)
        for share in ("max_missed_share", "min_training_share"):
            check_range(share, getattr(self, share), 0.0, 1.0)
        check_range("max_median_round_s", self.max_median_round_s, 0.0, MAX_SECONDS)
        for most in ("max_loss", "max_recovery_iterations"):
            check_range(most, getattr(self, most), 0.0, 1e9)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    about: str
    """One sentence."""
    mode: Literal["real", "cost"]
    """`real`: nodes train the model. `cost`: they exchange numbers that mean nothing, a few for each million parameters, in the time it would take."""
    seed: int = 0
    duration_s: float
    calm_s: float = 0.0
    """Of it, the last so many seconds: nothing goes wrong in them, whoever was there is back, and it is judged that the swarm lives (invariant 0)."""
    method: str = "default"
    """What the manifest says where `[manifest]` does not: of `farflung create --method`."""
    manifest: dict[str, dict[str, Any]]
    peers: tuple[PeerClass, ...]
    network: Network = Network()
    happenings: tuple[Happening, ...] = ()
    expect: Expect = Expect()
    costs: Costs = Costs()
    name: str = ""
    """The file's, without its ending."""

    def __post_init__(self) -> None:
        check_text("about", self.about, MAX_TEXT)
        check_range("duration_s", self.duration_s, 10.0, MAX_SECONDS)
        check_range("calm_s", self.calm_s, 0.0, self.duration_s)
        if self.latest_s < 0.0:
            raise ConfigError(
                f"calm_s = {self.calm_s:g}: nobody joins later than {REJOIN_S:g} s before it begins, so nobody ever would; give at most "
                f"duration_s - {REJOIN_S:g} = {self.duration_s - REJOIN_S:g}"
            )
        check_range("seed", self.seed, 0, 1 << 53)
        check_range("peers: all counts together", sum(c.count for c in self.peers), 1, MAX_PEERS)
        names = [c.name for c in self.peers]
        if len(set(names)) != len(names):
            raise ConfigError(f"two classes of peers have the same name: {', '.join(names)}")
        for peer_class in self.peers:
            if peer_class.stage is not None and self.stages < 2:
                raise ConfigError(
                    f"peers {peer_class.name!r}: there is no pipeline; leave out stage, or set manifest.pipeline.stages"
                )
            if peer_class.stage is not None and not 0 <= peer_class.stage < self.stages:
                raise ConfigError(f"peers {peer_class.name!r}: stage = {peer_class.stage}; give 0 to {self.stages - 1}")
        if self.mode == "cost" and "max_loss" in given(self.expect):
            raise ConfigError('expect.max_loss: mode = "cost" trains nothing; leave it out, or set mode = "real"')
        if self.stages < 2 and "max_recovery_iterations" in given(self.expect):
            raise ConfigError(
                "expect.max_recovery_iterations: there is no pipeline; leave it out, or set manifest.pipeline.stages"
            )
        if self.network.greetings == "reckoned" and (self.stages > 1 or self.costs.processors):
            what = "a pipeline" if self.stages > 1 else "costs.processors"
            raise ConfigError(f'network.greetings = "reckoned": with {what} each greeting is sent; leave it out')
        data = self.manifest.get("data", {})
        tokenizer = data.get("tokenizer", "bytes")
        if tokenizer != "bytes":
            raise ConfigError(f"manifest.data.tokenizer = {tokenizer!r}: simulated nodes train on bytes; leave it out")
        if self.mode == "cost" and "spec" in data:
            raise ConfigError(
                f'manifest.data.spec = {data["spec"]!r}: mode = "cost" reads no data; leave it out, or set mode = "real"'
            )
        if self.expect.min_members > self.num_peers:
            raise ConfigError(
                f"expect.min_members = {self.expect.min_members}: there are {self.num_peers} peers; lower it, or raise peers.count"
            )
        for number, happening in enumerate(self.happenings):
            if self._is_too_late(happening.at):
                raise ConfigError(
                    f"happenings[{number}].at = {happening.at:g}: {self._too_late}, so that it never happens; lower it, or {self._longer}"
                )
            if why := self.is_idle(happening):
                raise ConfigError(f"happenings[{number}]: {why}")

    @property
    def latest_s(self) -> float:
        """Nothing begins later: with a calm, so that whoever went before can be back when that begins."""
        return self.duration_s - (self.calm_s + REJOIN_S if self.calm_s else 0.0)

    def _is_too_late(self, at: float) -> bool:
        """Whether nothing comes of what would begin then."""
        return at > self.latest_s or at >= self.duration_s

    @property
    def _too_late(self) -> str:
        """Why, as a part of a sentence."""
        return f"later than {REJOIN_S:g} s before the calm" if self.calm_s else "not before the end"

    @property
    def _longer(self) -> str:
        """What to do about it, likewise."""
        return f"raise duration_s = {self.duration_s:g}" + (
            f" or lower calm_s = {self.calm_s:g}" if self.calm_s else ""
        )

    def check_joins(self) -> None:
        """Refuse peers that are written down and never there, or with a calm may not be. Raises ConfigError."""
        called = self._called
        for number, peer_class in enumerate(self.peers):
            first_s, last_s = peer_class.join_s
            is_late = self._is_too_late(last_s if self.calm_s else first_s)
            if is_late and not peer_class.trace and called.isdisjoint(self.select(peer_class.name)):
                who = f"no {peer_class.name!r} is ever"
                if not self._is_too_late(first_s):
                    who = f"some {peer_class.name!r} may never be"
                raise ConfigError(
                    f"peers[{number}].join_s = {list(peer_class.join_s)}: {self._too_late}, so that {who} there; lower it, {self._longer}, or let a "
                    'happening with what = "join" bring them'
                )

    def check_traces(self, folder: Path) -> None:
        """The same of those who live as hosts of traces do, which lie in `folder`. Raises ConfigError."""
        called = self._called
        for peer_class in self.peers:
            if not peer_class.trace:
                continue
            file = folder / peer_class.trace
            hosts = read_trace(file)
            for index, number in enumerate(self.select(peer_class.name)):
                first_s, _ = hosts[index % len(hosts)][0]
                if self._is_too_late(first_s) and number not in called:
                    raise ConfigError(
                        f"trace {file}: the first session of the host of '{peer_class.name}/{index}' begins at {first_s:g} s, {self._too_late}, so that it is "
                        f"never there; give it an earlier one, {self._longer}, or lower peers.count"
                    )

    @property
    def _called(self) -> set[int]:
        """Numbers of the peers that a happening brings."""
        return {peer for one in self.happenings if one.what == "join" for peer in self.everybody(one)}

    @property
    def stages(self) -> int:
        """Of its pipeline; 1 without one, and for what is no number, which whoever reads the manifest refuses."""
        stages = self.manifest.get("pipeline", {}).get("stages", 1)
        return stages if isinstance(stages, int) else 1

    @property
    def num_peers(self) -> int:
        return sum(c.count for c in self.peers)

    def roster(self) -> list[tuple[PeerClass, int, str]]:
        """By peer's number: its class, its number there, its region."""
        return [(c, index, c.regions[index % len(c.regions)]) for c in self.peers for index in range(c.count)]

    def label(self, peer: int) -> str:
        """`class/index` of a peer."""
        peer_class, index, _ = self.roster()[peer]
        return f"{peer_class.name}/{index}"

    def everybody(self, happening: Happening) -> list[int]:
        """Numbers of the peers that are named, in order. Raises ConfigError when somebody is not there."""
        return sorted({peer for who in happening.peers for peer in self.select(who)})

    def is_idle(self, happening: Happening) -> str:
        """Why nothing would come of it, whenever it is; empty when something may. Raises ConfigError when somebody is not there."""
        named = len(self.everybody(happening))
        if not named:
            return ""  # it is for everybody
        some = round(happening.share * named)
        if some == 0:
            return f"share = {happening.share:g} of {named} is nobody; raise it, or name more peers"
        if happening.what == "partition" and some == self.num_peers:
            return "partition with all peers on one side cuts nobody off; name fewer"
        if happening.what == "apart" and some < 2:
            return "apart with one peer: say from whom, as in peers = ['home/0', 'home/1']"
        return ""

    def select(self, who: str) -> list[int]:
        """Numbers of the peers that are meant. Raises ConfigError when nobody is."""
        if who.startswith("region:"):
            found = [n for n, (_, _, region) in enumerate(self.roster()) if f"region:{region}" == who]
        else:
            found = [n for n, (c, index, _) in enumerate(self.roster()) if who in (c.name, f"{c.name}/{index}")]
        if not found:
            names = [c.name for c in self.peers]
            raise ConfigError(
                f"no peer is called {who!r}{nearest(who, names)}; give a class ({', '.join(names)}), one of it "
                f"('{names[0]}/0'), or 'region:{self.roster()[0][2]}'"
            )
        return found


def shipped() -> list[str]:
    """Names of the scenarios that come with farflung."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def find_scenario(name: str) -> Path:
    """The file that a person means: a path, or the name of a shipped one. Raises ConfigError."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return path
    if name in shipped():
        return SHIPPED / f"{name}.toml"
    raise ConfigError(
        f"no scenario is called {name!r}{nearest(name, shipped())}; there are {', '.join(shipped())}, or give a path to a .toml file"
    )


def load_scenario(path: Path) -> Scenario:
    """Read and check a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the scenario {path}: {error}") from error
    try:
        scenario = parse_scenario(text, name=path.stem)
        scenario.check_traces(path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return scenario


def parse_scenario(text: str, *, name: str) -> Scenario:
    """Check the text of a file. Raises ConfigError that names the key."""
    if len(text) > MAX_TOML_CHARS:
        raise ConfigError(f"{len(text)} characters, at most {MAX_TOML_CHARS} are allowed")
    try:
        tree = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"no TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError("nested too deeply") from error
    for key, kind in _PARTS.items():  # each by itself first, so that errors tell where they are
        part = tree.get(key)
        if isinstance(part, list):
            for number, entry in enumerate(part):
                _convert(entry, kind, f"{key}[{number}]")
        elif part is not None:
            _convert(part, kind, key)
    made = _convert(tree | {"name": tree.get("name", name)}, Scenario, "")
    made.check_joins()
    if made.costs.trained_per_s and not made.costs.processors:
        raise ConfigError(
            f"costs.trained_per_s = {made.costs.trained_per_s:g}: it is what steps take of shared processors; give costs.processors as well, or leave it out"
        )
    return made


_PARTS: dict[str, type[msgspec.Struct]] = {
    "peers": PeerClass,
    "network": Network,
    "happenings": Happening,
    "expect": Expect,
    "costs": Costs,
}
_SECTIONS: dict[str, type[msgspec.Struct]] = {**_PARTS, "": Scenario, "session": Lasting, "absence": Lasting}

T = TypeVar("T")


def _convert(value: Any, kind: type[T], place: str) -> T:
    try:
        made = msgspec.convert(value, kind)
        if isinstance(made, PeerClass | Happening):
            made.check_given(value)  # also what is as it is by default
        return made
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}" if place else str(error)) from error
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), place)) from error


def _explain(message: str, place: str) -> str:
    """msgspec's words with the place first and, for unknown keys, the known ones."""
    what, _, below = message.partition(" - at `")
    place = (place + below.rstrip("`").removeprefix("$")).removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown:
        section = re.sub(r"\[\d+\]", "", place).rpartition(".")[2]
        known = [field.name for field in msgspec.structs.fields(_SECTIONS[section])]
        what = f"unknown key {unknown[1]!r}{nearest(unknown[1], known)}; known are {', '.join(known)}"
    return f"{place}: {what}" if place else what
