"""From `create` to a running node: manifests made and refused, names and invitations resolved, and real nodes end to end."""

import asyncio
import dataclasses
import io
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from farflung.node import daemon, machine, wanted
from farflung.node.control import only_node, request, stream
from farflung.node.events import read_events
from farflung.node.identity import Identity
from farflung.node.machine import choose_runtime, fit_memory
from farflung.node.options import CreatedSwarm, CreateOptions, ExportOptions, JoinOptions
from farflung.node.paths import resolve_paths
from farflung.node.peerbook import PeerBook
from farflung.node.recipe import read_recipe, swarm_dataset, swarm_tokenizer
from farflung.node.storage import FileStorage, newest_history
from farflung.protocol.chain import genesis
from farflung.protocol.errors import ConfigError, FarflungError, LocalError
from farflung.protocol.invitation import decode_invitation
from farflung.protocol.lap import Laps
from farflung.protocol.manifest import Manifest, open_manifest
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.naming import full_name
from farflung.training.inner import InnerConfig
from farflung.training.memory import RESERVE, forecast, parse_options
from farflung.training.methods import TRAINING_METHODS
from farflung.training.optimizers import parse_optimizer
from farflung.training.presets import PRESETS
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule

TEXT = "".join(f"line {i}: the swarm trains on text number {i * i}.\n" for i in range(2000))

TOML = """
[model]
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
seq_len = 32

[inner]
lr = 3e-3
warmup_steps = 10

[outer]
momentum = 0.5

[swarm]
total_steps = {steps}
inner_steps = 60
delay_steps = 5
batch_tokens = 128
min_contributors = 2
min_round_s = 1.0
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def found(tmp_path: Path, corpus: Path, *, steps: int = 6000, **flags: Any) -> tuple[CreatedSwarm, Manifest]:
    config = tmp_path / "swarm.toml"
    config.write_text(TOML.format(steps=steps))
    options = CreateOptions(**{"name": "alpha", "config": config, "data": str(corpus), "home": tmp_path / "a", **flags})
    made = daemon.create(options)
    return made, open_manifest(made.manifest.read_bytes(), swarm=bytes.fromhex(made.hash_hex), peer=None)


# ---- create --------------------------------------------------------------------------------------------------------


def test_create_writes_manifest_secret_and_genesis(tmp_path: Path, corpus: Path) -> None:
    made, manifest = found(tmp_path, corpus, port=4242, seed=7, local=True, lr=1e-3)
    assert (manifest.inner.lr, manifest.model.init_seed, manifest.data.order_seed) == (1e-3, 7, 7)
    assert manifest.data.spec == f"text:{corpus}" and manifest.model.vocab_size == 264
    invitation = decode_invitation(made.invitation)
    assert (invitation.name, invitation.swarm.hex()) == ("alpha", made.hash_hex)
    assert [a.rpartition("/p2p/")[0] for a in invitation.addresses] == ["/ip4/127.0.0.1/tcp/4242"]
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("alpha")
    secret = swarm.folder / "invite"
    assert bytes.fromhex(secret.read_text()) == invitation.invite_seed
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    anchor, history = newest_history(FileStorage(swarm.checkpoint).load_history())
    assert anchor is None
    assert [c.commit for c in history] == [genesis(manifest.founder, read_recipe(manifest).rules)]


def test_defaults_need_nothing_but_a_name_and_fit_together(tmp_path: Path, corpus: Path) -> None:
    made = daemon.create(CreateOptions(name="b", data=str(corpus), steps=30, home=tmp_path / "a", open=True))
    manifest = open_manifest(made.manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.model.preset, manifest.inner_steps, manifest.inner.warmup_steps) == ("1m", 30, 3)
    assert manifest.admission.rule == "open" and not (made.manifest.parent / "invite").exists()
    recipe = read_recipe(manifest)
    assert recipe.num_parameters == recipe.settings().rules.numel == sum(t.numel() for t in recipe_parameters(manifest))
    assert recipe.rounds_text == "1 rounds"


@pytest.mark.parametrize("name", sorted(TRAINING_METHODS))
def test_a_method_is_what_neither_flags_nor_the_file_say(tmp_path: Path, corpus: Path, name: str) -> None:
    options = CreateOptions(name="b", method=name, data=str(corpus), steps=300, home=tmp_path / "a", open=True)
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    method = TRAINING_METHODS[name]
    assert (manifest.inner.optimizer, manifest.outer.lr, manifest.outer.momentum) == (
        "muon",
        method.outer_lr,
        method.outer_momentum,
    )
    assert manifest.uplink_codec == manifest.downlink_codec == method.codec
    assert (manifest.feedback.uplink, manifest.feedback.downlink) == ("kept", "residual")
    assert (manifest.inner_steps, manifest.fragments, manifest.laps) == (30, 3, Laps(least=10, most=10))
    assert read_recipe(manifest).settings().uplink == method.codec

    (tmp_path / "c.toml").write_text("[outer]\nlr = 0.4\n")
    other = dataclasses.replace(
        options, name="c", config=tmp_path / "c.toml", codec="int8(block=128)", inner_steps=5, optimizer="adamw"
    )
    manifest = open_manifest(daemon.create(other).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.inner.optimizer, manifest.outer.lr, manifest.outer.momentum) == (
        "adamw",
        0.4,
        method.outer_momentum,
    )
    assert manifest.uplink_codec == "int8(block=128)" and manifest.laps == Laps(least=5, most=5)
    assert manifest.fragments == 1, "three do not divide five steps"


def test_laps_may_be_left_to_the_swarm(tmp_path: Path, corpus: Path) -> None:
    options = CreateOptions(
        name="b", method="default", inner_steps="auto", data=str(corpus), steps=300, home=tmp_path / "a", open=True
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.inner_steps, manifest.fragments, manifest.delay_steps) == ("auto", 3, "auto")
    recipe = read_recipe(manifest)
    assert recipe.rules.laps == Laps(least=4, most=166) and recipe.rules.total_steps == 300
    assert recipe.rounds_text == "1 to 75 rounds"

    coarse = dataclasses.replace(options, name="c", method=None, codec="sign(block=256)", steps=4000)
    manifest = open_manifest(daemon.create(coarse).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.feedback.after_rounds == 2, "a quarter of the run at the longest laps"


def recipe_parameters(manifest: Manifest) -> list[torch.Tensor]:
    from farflung.training.model import Decoder

    return list(Decoder(read_recipe(manifest).model, seed=0).parameters())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"name": "Bad Name"}, "swarm name"),
        ({"preset": "1n", "config": None}, "no model is called '1n'"),
        ({"config": Path("preset.toml")}, "model.preset = 7: must be a string"),
        ({"data": "/nowhere/at/all"}, "no such file or folder"),
        ({"tokenizer": "/nowhere.json"}, "cannot read the tokenizer"),
        ({"method": "defualt"}, "no method is called 'defualt'; there are default, thrifty; did you mean"),
        ({"codec": "int9"}, "unknown codec"),
        ({"optimizer": "adamv"}, "no inner optimizer is called 'adamv'; there are adamw, muon, torch.optim.A"),
        ({"optimizer": "torch.optim.SGD(lr=0.1)"}, "its learning rate is not given here but by inner.lr"),
        ({"optimizer": "muon(speed=2)"}, "it takes adamw_lr, iterations, momentum"),
        ({"batch_tokens": 100}, "must be a multiple of model.seq_len"),
        ({"config": Path("/nowhere.toml")}, "cannot read /nowhere.toml"),
    ],
)
def test_create_refuses_in_one_line(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("preset.toml").write_text("[model]\npreset = 7\n")
    with pytest.raises(ConfigError) as caught:
        found(tmp_path, corpus, **flags)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert resolve_paths(tmp_path / "a", {}).swarms() == []


def test_a_name_is_founded_once_on_a_machine(tmp_path: Path, corpus: Path) -> None:
    found(tmp_path, corpus)
    with pytest.raises(ConfigError, match="continue that one with `farflung join alpha`"):
        found(tmp_path, corpus)


# ---- the recipe ----------------------------------------------------------------------------------------------------


def test_settings_follow_from_the_manifest(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus, codec="int8(block=256)")
    recipe = read_recipe(manifest)
    settings, pace = recipe.settings(), recipe.pace()
    assert (settings.align, settings.rules.ahead, settings.rules.total_steps) == (256, 3 * 4, manifest.total_steps)
    assert 1.0 < settings.bytes_per_element < 1.1
    assert (pace.laps, pace.samples_per_step, pace.tokens_per_sample) == (Laps.fixed(60, 5), 4, 32)
    assert settings.rules.laps == pace.laps and settings.step_tokens == pace.step_tokens == 4 * 32
    assert not settings.admits(bytes(32), b"") and not settings.admits(bytes(32), bytes(64))


def test_a_codec_may_be_a_policy(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus, codec="1d:fp32,int8(block=32)")
    recipe = read_recipe(manifest)
    assert recipe.settings().uplink == "1d:fp32,int8(block=32)" and recipe.settings().align == 32
    assert recipe.uplink.numel == recipe.num_parameters
    assert len(recipe.uplink.segments) == 2 * manifest.model.num_layers, "the last norms are neighbours"


def test_each_way_has_the_codec_that_the_manifest_names(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text('[swarm]\nuplink_codec = "1d:fp32,int4(block=64)"\ndownlink_codec = "int8(block=128)"\n')
    options = CreateOptions(name="b", config=file, data=str(corpus), steps=30, home=tmp_path / "a", open=True)
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    recipe = read_recipe(manifest)
    settings = recipe.settings()
    assert (recipe.uplink.spec, recipe.downlink.spec) == ("1d:fp32,int4(block=64)", "int8(block=128)")
    assert (settings.uplink, settings.downlink, settings.align) == (recipe.uplink.spec, recipe.downlink.spec, 128)
    assert settings.bytes_per_element == recipe.downlink.expected_nbytes() / recipe.num_parameters, (
        "the larger of the two"
    )


def test_a_codec_that_this_version_does_not_know_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"swarm.uplink_codec = '1d:fp32,int7': unknown codec 'int7'"):
        found(tmp_path, corpus, codec="1d:fp32,int7")
    _, manifest = found(tmp_path, corpus)
    with pytest.raises(ConfigError, match=r"'alpha' cannot be used: unknown codec 'int7'"):
        read_recipe(msgspec.structs.replace(manifest, uplink_codec="1d:fp32,int7"))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, FeedbackSpec()),
        ({"codec": "int4"}, FeedbackSpec()),
        ({"codec": "deadzone(bits=1.0)"}, FeedbackSpec(uplink="residual", downlink="residual", after_rounds=25)),
        ({"codec": "1d:fp32,sign"}, FeedbackSpec(uplink="residual", downlink="residual", after_rounds=25)),
        ({"codec": "sign", "feedback": False}, FeedbackSpec()),
        ({"feedback": True}, FeedbackSpec(uplink="residual", downlink="residual", after_rounds=25)),
    ],
)
def test_feedback_follows_the_codec_unless_it_is_said(
    tmp_path: Path, corpus: Path, flags: dict[str, Any], wanted: FeedbackSpec
) -> None:
    _, manifest = found(tmp_path, corpus, **flags)
    assert manifest.feedback == wanted, "of 100 rounds"


def test_feedback_is_in_the_file_as_well(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(
        '[swarm]\nuplink_codec = "deadzone(bits=0.5)"\n[feedback]\ndecay = 0.95\nafter_rounds = 3\n', encoding="utf-8"
    )
    made = daemon.create(
        CreateOptions(name="b", config=file, data=str(corpus), steps=30, home=tmp_path / "a", open=True)
    )
    manifest = open_manifest(made.manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.feedback == FeedbackSpec(uplink="residual", downlink="none", decay=0.95, after_rounds=3)


def test_the_inner_options_reach_the_learner(tmp_path: Path, corpus: Path) -> None:
    sections = TOML.replace("seq_len = 32", "seq_len = 32\nqk_norm = true").replace(
        "lr = 3e-3", "lr = 3e-3\nz_loss = 1e-4"
    )
    config = tmp_path / "muon.toml"
    config.write_text(sections.format(steps=6000))
    options = CreateOptions(
        name="m", config=config, data=str(corpus), home=tmp_path / "a", optimizer="muon(adamw_lr=0.001)"
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    recipe = read_recipe(manifest)
    learner = recipe.learner(swarm_dataset(manifest, swarm_tokenizer(manifest, tmp_path / "none")), Runtime())
    reports = [learner.train(range(step * 4, step * 4 + 4), step) for step in range(20)]
    assert reports[-1].loss < reports[0].loss - 0.5
    keys = {
        name.split("/")[1].rpartition(".")[0] + "/" + name.split("/")[2] for name in learner.replica.optimizer.tensors()
    }
    assert {"model.layers.0.mlp.up_proj/momentum", "model.embed_tokens/exp_avg_sq"} <= keys
    assert {"model.layers.1.self_attn.q_norm/exp_avg"} <= keys and "model.embed_tokens/momentum" not in keys
    assert recipe.inner.z_loss == 1e-4


def test_other_data_is_refused_with_the_remedy(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus)
    tokenizer = swarm_tokenizer(manifest, tmp_path / "none")
    assert swarm_dataset(manifest, tokenizer).num_samples == manifest.data.num_samples
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT + "one line more\n")
    with pytest.raises(ConfigError, match=r"is not what swarm 'alpha' trains on.*--data"):
        swarm_dataset(manifest, tokenizer, f"text:{copy}")
    corpus.unlink()
    with pytest.raises(ConfigError, match="no such file or folder; say where it lies here with `--data`"):
        swarm_dataset(manifest, tokenizer)


def test_memory_and_devices_are_checked_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = InnerConfig(schedule=Schedule(peak=1e-3, kind="constant"))
    huge = dataclasses.replace(PRESETS["8b"], dim=1 << 16, num_heads=64, num_kv_heads=64)
    with pytest.raises(ConfigError, match="or join a swarm with a smaller model"):
        fit_memory(huge, plain, 1, Runtime())
    needs = forecast(PRESETS["1m"], parse_optimizer(plain.optimizer), parse_options("none"), residuals=1)
    usable = needs.device_bytes + needs.host_bytes
    monkeypatch.setattr(machine, "free_bytes", lambda device, limit=None: int(usable / (1 - RESERVE)) + 1)
    assert fit_memory(PRESETS["1m"], plain, 1, Runtime(), "none", residuals=1) == Runtime()
    with pytest.raises(ConfigError, match="need"):
        fit_memory(PRESETS["1m"], plain, 1, Runtime(), "none", residuals=2)
    with pytest.raises(ConfigError, match="--device 'abacus'"):
        choose_runtime("abacus", "auto", compiled=False)
    with pytest.raises(ConfigError, match="CUDA devices"):
        choose_runtime("cuda:63", "auto", compiled=False)
    assert choose_runtime("cpu", "bf16", compiled=False).autocast is torch.bfloat16


# ---- names and known peers -----------------------------------------------------------------------------------------


def test_what_join_means_here(tmp_path: Path, corpus: Path) -> None:
    made, manifest = found(tmp_path, corpus, port=4242, local=True)
    here, there = resolve_paths(tmp_path / "a", {}), resolve_paths(tmp_path / "b", {})
    for text in ("alpha", made.hash_hex[:10], full_name("alpha", manifest.founder)):
        swarm = wanted.local_swarm(here, text, ()).swarm
        assert swarm is not None and swarm.hash_hex == made.hash_hex
    invited = wanted.local_swarm(there, made.invitation, ())
    assert invited.swarm is not None and (invited.swarm.folder / "invite").exists()
    assert invited.seeds(b"") == list(decode_invitation(made.invitation).addresses)
    assert wanted.local_swarm(there, "alpha", ()).seeds(b"") == invited.seeds(b"")  # cached on disk
    assert wanted.founders_here(here) == {"alpha": manifest.founder}
    # Another founder's swarm of this name is not ours, and can only be looked up.
    assert wanted.local_swarm(here, "alpha@aaaaaaaaaaaa", ("/ip4/1.2.3.4/tcp/1/p2p/x",)).swarm is None
    with pytest.raises(ConfigError, match="join with an invitation"):
        wanted.local_swarm(here, "beta", ())
    with pytest.raises(ConfigError, match="mistyped or damaged"):
        wanted.local_swarm(there, made.invitation[:-6] + "aaaaaa", ())


def test_an_invitation_without_addresses_is_refused_at_once(tmp_path: Path, corpus: Path) -> None:
    made, _ = found(tmp_path, corpus)
    here, there = resolve_paths(tmp_path / "a", {}), resolve_paths(tmp_path / "b", {})
    assert not made.reachable
    with pytest.raises(ConfigError, match="farflung invite"):
        wanted.local_swarm(there, made.invitation, ())
    assert there.swarms() == []
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.load_or_create(here.identity).libp2p_id}"
    for paths, peers in ((here, ()), (there, (address,)), (there, ())):  # founded here; told where; remembered
        assert wanted.local_swarm(paths, made.invitation, peers).swarm is not None


def test_the_book_asks_those_heard_last_first(tmp_path: Path) -> None:
    peers = [Identity.generate() for _ in range(300)]
    book = PeerBook(tmp_path / "peers.json")
    for age, one in enumerate(peers):
        address = f"/ip4/10.0.0.1/tcp/{age + 1}/p2p/{one.libp2p_id}"
        book.note(one.public_key, [address, "tls://10.0.0.1:5"], 1e9 - age)
    book.note(Identity.generate().public_key, [], 2e9)  # cannot be dialled, so not worth remembering
    book.save()
    again = PeerBook(tmp_path / "peers.json")
    assert len(again.peers()) == 256 and next(iter(again.peers())) == peers[0].public_key
    assert len(again.seeds(peers[0].public_key)) == 8
    assert f"/p2p/{peers[1].libp2p_id}" in again.seeds(peers[0].public_key)[0]
    (tmp_path / "peers.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        PeerBook(tmp_path / "peers.json")


def test_a_stranger_without_invitation_is_told(tmp_path: Path, corpus: Path) -> None:
    made, _ = found(tmp_path, corpus)
    (made.manifest.parent / "invite").unlink()
    with pytest.raises(FarflungError, match="by invitation only"):
        daemon.run_join(JoinOptions(swarm="alpha", home=tmp_path / "a", local=True, live=False))


# ---- real nodes ----------------------------------------------------------------------------------------------------


class Node:
    """A daemon in this loop, and what its control socket says."""

    def __init__(self, home: Path, swarm: str) -> None:
        self.home = home
        self.events: list[dict[str, Any]] = []
        self.changed = asyncio.Condition()
        paths = resolve_paths(home, {})
        self.output = io.StringIO()
        options = JoinOptions(swarm=swarm, home=home, local=True, live=False, device="cpu")
        self.locks = ExitStack()
        meant = wanted.local_swarm(paths, swarm, ())
        assert meant.swarm is not None
        self.swarm = meant.swarm
        self.locks.enter_context(only_node(self.swarm))
        console = Console(file=self.output, force_terminal=False, width=200)
        identity = Identity.load_or_create(paths.identity)
        self.peer = identity.public_key.hex()
        self.daemon = daemon.NodeDaemon(options, paths, identity, meant, console, self.locks)

    async def run(self) -> None:
        with self.locks:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                await self.daemon.run()
                watching.cancel()

    async def _watch(self) -> None:
        while not self.swarm.socket.exists():
            await asyncio.sleep(0.02)
        async for event in stream(self.swarm, "events"):
            async with self.changed:
                self.events.append(event)
                self.changed.notify_all()

    async def until(self, fits: Callable[[dict[str, Any]], bool], *, seen: int = 0) -> dict[str, Any]:
        """The first event that fits, the first `seen` left out."""
        async with self.changed:
            while True:
                for event in self.events[seen:]:
                    if fits(event):
                        return event
                seen = len(self.events)
                await self.changed.wait()

    async def contributed(self) -> dict[str, Any]:
        """The next round that holds this node's work."""

        def holds(event: dict[str, Any]) -> bool:
            return event["event"] == "round.commit" and bool(event["contributed"])

        return await self.until(holds, seen=len(self.events))


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(node.run())
        yield node
        if not task.done():
            node.daemon.stop("the test is over")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_three_real_nodes_join_late_leave_restart_and_outlive_the_first(tmp_path: Path, corpus: Path) -> None:
    made, manifest = found(tmp_path, corpus, port=0, optimizer="muon")

    async def main() -> None:
        async with asyncio.timeout(100), AsyncExitStack() as stack:
            a = await stack.enter_async_context(running(Node(tmp_path / "a", "alpha")))
            await a.until(lambda e: e["event"] == "node.state" and e["state"] == "ready")
            invitation = (await request(a.swarm, "invitation"))["invitation"]
            assert f"farflung join {invitation}" in a.output.getvalue()

            b = await stack.enter_async_context(running(Node(tmp_path / "b", invitation)))
            first = await b.contributed()
            assert set(first["contributors"]) <= {a.peer, b.peer}
            status = await request(b.swarm, "status")
            assert status["swarm"] == "alpha" and status["total_steps"] == 6000

            # A third joins while the others go on, and leaves when asked to.
            async with running(Node(tmp_path / "c", invitation)) as c:
                await c.contributed()
                rows = (await request(c.swarm, "peers"))["peers"]
                assert {row["peer"] for row in rows if row["member"]} == {a.peer, b.peer, c.peer}
                reply = await request(c.swarm, "leave", timeout_s=30.0)
                assert reply == {"reason": "asked to leave"}
            await b.until(lambda e: e["event"] == "peer.left" and e["of"] == c.peer)

            # The founder, whose address is in the invitation, goes; c finds the swarm through b, by name.
            a.daemon.stop("the founder goes")
            await b.until(lambda e: e["event"] == "peer.left" and e["of"] == a.peer)
            known = PeerBook(c.swarm.peers).peers()
            assert bytes.fromhex(b.peer) in known
            again = await stack.enter_async_context(running(Node(tmp_path / "c", "alpha")))
            late = await again.contributed()
            assert set(late["contributors"]) == {b.peer, c.peer}
            start = next(e for e in read_events(again.swarm.events) if e["event"] == "node.start" and e["resumed"])
            assert start["peer"] == c.peer

    asyncio.run(main())
    # One history: digests of equal versions are equal, wherever a node was.
    digests: dict[int, set[str]] = {}
    for home in "abc":
        for event in read_events(resolve_paths(tmp_path / home, {}).find_swarm("alpha").events):
            if event["event"] == "round.commit":
                digests.setdefault(event["version"], set()).add(event["digest"])
    assert len(digests) > 3 and all(len(one) == 1 for one in digests.values())

    facts = daemon.export(ExportOptions(swarm="alpha", folder=tmp_path / "model", home=tmp_path / "c"))
    assert facts["rounds"] >= 1 and facts["peers that contributed"] >= 2
    assert (tmp_path / "model" / "model.safetensors").exists()
    with pytest.raises(LocalError, match="name another folder"):
        daemon.export(ExportOptions(swarm="alpha", folder=corpus / "model", home=tmp_path / "c"))
    assert facts["manifest hash"] == made.hash_hex and manifest.name in (tmp_path / "model" / "README.md").read_text()
