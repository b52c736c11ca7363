"""The command line: help, errors, options handed on, and answers of a node behind the real control socket."""

import asyncio
import errno
import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from farflung.node import options, query
from farflung.node.cli import app
from farflung.node.control import ControlServer, only_node, request
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.status import LedgerStatus, NodeStatus, PeerStatus, SampleStatus, SampleStop
from farflung.protocol.errors import NetworkError
from farflung.training.errors import DataError

SWARM = "ab" * 32
PEER = "12" * 32
FULL_NAME = "alpha@abcdefghijkl"
HEAVY = ("torch", "hivemind", "matplotlib", "cryptography", "numpy", "farflung.node.daemon")
NO_DEVICES = ("abacus", "meta", "xpu", "hpu:0", "cuda:x")
EVENTS: list[dict[str, Any]] = [
    {"time": 50.0, "event": "node.state", "state": "training", "reason": ""},
    {"time": 51.0, "event": "round.missed", "round": 4, "reason": "two seconds late"},
]


LEDGER: dict[str, Any] = {
    **{"swarm": "alpha", "height": 3, "version": 2, "num_samples": 900, "epoch": 0, "cursor": 50, "trained": 30},
    **{"epoch_handed_out": 50, "epoch_trained": 30, "earlier_left": 0, "held": [], "free": [(20, 40)], "suspended": []},
    **{"since_height": 0, "trained_by": {PEER: 30}},
}


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    resolve_paths(tmp_path, {}).add_swarm(SWARM, "alpha")
    return tmp_path


@contextmanager
def running_node(home: Path) -> Iterator[None]:
    """A control server as a node has one, in a thread of its own; commands run their own loop."""
    node = NodeStatus(swarm="alpha", peer=PEER, state="training", step=40, total_steps=100, loss=2.5)
    peers = [
        PeerStatus(peer="34" * 32, state="suspect", member=True, last_seen_s=75.0, carrier="tls", sent_bytes=10**6),
        PeerStatus(peer=PEER, state="self", member=True, step=40, device="cpu"),
    ]
    started, loops = threading.Event(), []

    async def serve() -> None:
        async def status(args: dict[str, Any]) -> dict[str, Any]:
            return dict(msgspec.to_builtins(node))

        async def known(args: dict[str, Any]) -> dict[str, Any]:
            return {"peers": msgspec.to_builtins(peers)}

        async def ledger(args: dict[str, Any]) -> dict[str, Any]:
            number = args["sample"]
            stops = [SampleStop(height=2, state="trained", peer=PEER)]
            sample = None if number is None else SampleStatus(number=number, epoch=0, stops=stops)
            return dict(msgspec.to_builtins(LedgerStatus(**LEDGER, sample=sample)))

        async def leave(args: dict[str, Any]) -> dict[str, Any]:
            return {"reason": "asked to"}

        async def invitation(args: dict[str, Any]) -> dict[str, Any]:
            return {"invitation": "farflung1abc", "full_name": FULL_NAME}

        async def events(args: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            for event in EVENTS:
                yield event

        handlers = {
            "status": status,
            "peers": known,
            "leave": leave,
            "events": events,
            "invitation": invitation,
            "ledger": ledger,
        }
        server = ControlServer(resolve_paths(home, {}).find_swarm("alpha").socket, handlers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run())
            await server.started.wait()
            loops.append((asyncio.get_running_loop(), server))
            started.set()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(20)
    try:
        yield
    finally:
        loop, server = loops[0]
        loop.call_soon_threadsafe(server.stop)
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "command",
    [
        "create",
        "join",
        "status",
        "peers",
        "ledger",
        "invite",
        "leave",
        "forget",
        "export",
        "eval",
        "sample",
        "id show",
        "id backup",
        "id restore",
    ],
)
def test_every_command_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "--home" in result.output


def test_help_and_status_import_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from farflung.sims.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"assert CliRunner().invoke(app, ['status', '--home', {str(tmp_path)!r}]).exit_code == 2\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_a_second_node_is_told_of_at_once(home: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom farflung.node.cli import app\n"
        f"done = CliRunner().invoke(app, ['join', 'alpha', '--home', {str(home)!r}])\n"
        "print(done.exit_code, 'torch' in sys.modules, done.output)"
    )
    [swarm] = resolve_paths(home, {}).swarms()
    with only_node(swarm):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("2 False error: a node of swarm alpha runs here already"), result.stdout


def test_status_and_peers_of_a_running_node(home: Path) -> None:
    with running_node(home):
        shown = run("status", "--home", home)
        assert shown.exit_code == 0, shown.output
        assert "training · step 40/100" in shown.stdout and "alpha" in shown.stdout
        nodes = json.loads(run("status", "alpha", "--home", home, "--json").stdout)["nodes"]
        assert [(one["swarm"], one["loss"]) for one in nodes] == [("alpha", 2.5)]
        table = run("peers", "--home", home).stdout
        assert table.index(PEER[:12]) < table.index("343434343434")
        peers = json.loads(run("peers", "alpha", "--home", home, "--json").stdout)["peers"]
        assert [peer["state"] for peer in peers] == ["suspect", "self"]
        plain = run("ledger", "--home", home).stdout
        assert "50 of 900 samples handed out, 30 trained" in plain and "free, to be handed out next: 20 to 39" in plain
        traced = run("ledger", "alpha", "--sample", 41, "--home", home).stdout
        assert traced == f"{plain}sample 41, of epoch 0\n  by commit 2: trained by {PEER[:12]}\n"
        shown = json.loads(run("ledger", "--sample", 41, "--home", home, "--json").stdout)
        assert shown["sample"]["stops"] == [{"height": 2, "state": "trained", "peer": PEER}] and shown["free"] == [
            [20, 40]
        ]
        assert run("ledger", "--sample", -1, "--home", home).exit_code == 2
        assert run("invite", "--home", home).stdout == f"farflung join farflung1abc\nfull name {FULL_NAME}\n"
        invited = json.loads(run("invite", "alpha", "--home", home, "--json").stdout)
        assert invited == {"invitation": "farflung1abc", "full_name": FULL_NAME}
        assert run("leave", "--home", home).stdout == "left: asked to\n"
        assert json.loads(run("leave", "--home", home, "--json").stdout) == {"left": "asked to"}
        assert "round 4 missed: two seconds late" in run("status", "--watch", "--home", home).stdout
        watched = run("status", "--watch", "--home", home, "--json").stdout
        assert [json.loads(line) for line in watched.splitlines()] == EVENTS


def test_a_stopped_node_hides_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = resolve_paths(home, {}).add_swarm("cd" * 32, "gamma")
    monkeypatch.setattr(query, "request", partial(request, timeout_s=2.0))
    with running_node(home), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(stopped.socket))
        listening.listen()  # and nobody reads what comes
        shown = run("status", "--home", home)
        assert shown.exit_code == 2 and "training · step 40/100" in shown.stdout
        assert shown.stderr.startswith("error: the node of swarm gamma did not answer within 2 s; if it was stopped")
        told = run("status", "--home", home, "--json")
        assert told.exit_code == 2 and [one["swarm"] for one in json.loads(told.stdout)["nodes"]] == ["alpha"]
        alone = run("status", "gamma", "--home", home, "--json")
        assert (alone.exit_code, alone.stdout, alone.stderr) == (2, "", shown.stderr)


def test_all_nodes_are_asked_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stopped ones nobody waits twice as long."""
    resolve_paths(home, {}).add_swarm("cd" * 32, "gamma")
    both = asyncio.Barrier(2)

    async def answer(swarm: SwarmPaths, verb: str) -> dict[str, Any]:
        async with asyncio.timeout(10):
            await both.wait()
        return {"swarm": swarm.name, "peer": PEER}

    monkeypatch.setattr(query, "runs", lambda swarm: True)
    monkeypatch.setattr(query, "request", answer)
    statuses, silent = asyncio.run(query.running_statuses(None, home))
    assert ([one.swarm for one in statuses], silent) == (["alpha", "gamma"], [])


@pytest.mark.parametrize("command", ["status", "peers", "ledger", "invite", "leave"])
def test_no_node_is_one_line_and_exit_code_2(home: Path, command: str) -> None:
    result = run(command, "--home", home)
    assert result.exit_code == 2
    assert result.stdout == ""
    said = "error: no node of swarm alpha runs here; start it with `farflung join alpha`\n"
    assert result.stderr == said
    assert run(command, "beta", "--home", home).stderr.startswith("error: this machine knows no swarm 'beta'")
    log = resolve_paths(home, {}).find_swarm("alpha").events
    killed = {"event": "step", "time": 86_400.0, "swarm": "alpha", "peer": PEER, "height": 0, "version": 0, "step": 3}
    for last, how in (
        (killed, "did not stop, but was killed, or lost power after 1970-01-0"),
        (killed | {"event": "node.stop", "reason": "asked to"}, "stopped on 1970-01-0"),
        (killed | {"event": "node.failed", "reason": "no room"}, "failed on 1970-01-0"),
    ):
        with log.open("a") as file:
            file.write(json.dumps(last) + "\n")
        assert run(command, "--home", home).stderr.startswith(f"{said.strip()}. The last one {how}")
    resolve_paths(home, {}).add_swarm("cd" * 32, "gamma")
    assert run(command, "--home", home).stderr == (
        "error: no node runs here; start one with `farflung join NAME`: alpha (abababababab), gamma (cdcdcdcdcdcd)\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "x", "--inner-steps", "0"], "--inner-steps must be above 0"),
        (["create", "x", "--inner-steps", "some"], "--inner-steps must be a whole number or auto, not 'some'"),
        (["create", "x", "--delay-steps", "-1"], "--delay-steps must be a whole number or auto, not '-1'"),
        (["create", "x", "--port", "70000"], "--port must be between"),
        *((["join", "x", "--device", bad], f"--device '{bad}': give auto, cpu, cuda") for bad in NO_DEVICES),
        *(([word, "--device", "cuda:x"], "--device 'cuda:x': give") for word in ("doctor", "eval", "sample")),
        (["join", "x", "--dtype", "int4"], "--dtype must be one of auto, bf16, fp32"),
        (["join", "x", "--up-mbps", "nan"], "--up-mbps must be above 0"),
        (["join", "x", "--region", "eu west"], "--region has up to 32 of a-z"),
        (["join", "x", "--owner", "a" * 33], "--owner has up to 32 of a-z"),
        (["export", "x", "."], "not an empty folder"),
    ],
)
def test_wrong_flags_name_the_flag(words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


def fake_daemon(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    daemon = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "farflung.node.daemon", daemon)  # type: ignore[arg-type]
    import farflung.node

    monkeypatch.setattr(farflung.node, "daemon", daemon, raising=False)


def test_create_hands_its_flags_on_and_prints_the_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[options.CreateOptions] = []

    def create(wanted: options.CreateOptions) -> options.CreatedSwarm:
        asked.append(wanted)
        return options.CreatedSwarm(
            name="x",
            full_name=FULL_NAME,
            hash_hex=SWARM,
            invitation="farflung1abc",
            addresses=("there",) if wanted.port != 0 else (),
            port=4242 if wanted.port is None else wanted.port,
            published=bool(wanted.peers),
            founder=PEER,
            manifest=Path("m"),
            about="1.0 M parameters, 40 steps, 1 rounds, data python",
            end_of_text="</s>",
            layers=(2, 3),
            samples=12_345,
            heldout_tokens=None if wanted.local else 67_890,
        )

    fake_daemon(monkeypatch, create=create)
    there = run("create", "x", "--preset", "micro", "--steps", 40, "--peer", "a", "--peer", "b", "--open").stdout
    assert "farflung join farflung1abc" in there and "anybody" in there
    assert "published in the DHT, under its name and its hash, through a, b\n" in there and "as soon as" not in there
    assert "2 stages of 2 + 3 layers; the first has the head besides" in there
    assert "\na text ends with the tokenizer's </s>; another is said by data.end_of_text (--config)\n" in there
    later = run("create", "x").stdout
    assert f"swarm x founded ({SWARM[:12]}), full name {FULL_NAME}\n" in later
    assert "farflung join farflung1abc" in later and "published when this machine's node starts" in later
    assert "as soon as that node runs, on port 4242" in later
    assert "\n1.0 M parameters, 40 steps, 1 rounds, data python\n" in later and "--local" not in later
    assert "\n12,345 samples of the data to train on, 67,890 tokens held out\n" in later
    nowhere = run("create", "x", "--port", 0).stdout
    assert "farflung join farflung1abc\nit names no address yet, because of --port 0" in nowhere
    first = options.CreateOptions(name="x", preset="micro", steps=40, peers=("a", "b"), open=True)
    assert asked == [first, options.CreateOptions(name="x"), options.CreateOptions(name="x", port=0)]
    here = run("create", "x", "--local").stdout
    assert "farflung join x --local\n" in here and "farflung join farflung1abc --local\n" in here
    assert "\n12,345 samples of the data to train on\n" in here  # of a stream nobody knows more
    made = json.loads(run("create", "x", "--json").stdout)
    assert made == {
        "name": "x",
        "full_name": FULL_NAME,
        "hash": SWARM,
        "founder": PEER,
        "open": False,
        "about": "1.0 M parameters, 40 steps, 1 rounds, data python",
        "end_of_text": "</s>",
        "layers": [2, 3],
        "samples": 12_345,
        "heldout_tokens": 67_890,
        "invitation": "farflung1abc",
        "manifest": "m",
        "addresses": ["there"],
        "port": 4242,
        "published": False,
    }


def test_join_and_export_hand_their_flags_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def export(wanted: options.ExportOptions) -> dict[str, Any]:
        asked.append(wanted)
        return {"step": 40}

    fake_daemon(monkeypatch, run_join=asked.append, export=export)
    flags = [
        "--stay",
        "--compile",
        "--up-mbps",
        "5",
        "--down-mbps",
        "7",
        "--threads",
        1,
        "--no-live",
        "--region",
        "EU-West",
        "--owner",
        "ann",
        "--json",
    ]
    resolve_paths(tmp_path / "home", {}).add_swarm("ab" * 32, "x")
    assert run("join", "x", *flags, "--home", tmp_path / "home").exit_code == 0
    assert run("export", "x", tmp_path / "out", "--home", tmp_path / "home").stdout.endswith("step: 40\n")
    what = {"exit_when_done": False, "compile": True, "up_mbps": 5.0, "down_mbps": 7.0, "threads": 1, "live": False}
    joined = options.JoinOptions(swarm="x", region="eu-west", owner="ann", as_json=True, home=tmp_path / "home", **what)
    assert asked == [joined, options.ExportOptions(swarm="x", folder=tmp_path / "out", home=tmp_path / "home")]


def test_bugs_keep_their_traceback_and_errors_of_peers_do_not(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def bug(wanted: Any) -> None:
        raise KeyError("bug")

    def unreachable(wanted: Any) -> None:
        raise NetworkError("nobody answers")

    fake_daemon(monkeypatch, run_join=bug)
    result = run("join", "alpha", "--home", home)
    assert result.exit_code == 1 and isinstance(result.exception, KeyError)
    fake_daemon(monkeypatch, run_join=unreachable)
    result = run("join", "alpha", "--home", home)
    assert result.exit_code == 2 and result.stderr == "error: nobody answers\n"


def test_identity_is_made_copied_and_restored(tmp_path: Path) -> None:
    here, there, copy = tmp_path / "here", tmp_path / "there", tmp_path / "copy.txt"
    assert "farflung id show" in run("id", "backup", copy, "--home", here).stderr
    shown = json.loads(run("id", "show", "--home", here, "--json").stdout)
    assert json.loads(run("id", "show", "--home", here, "--json").stdout) == shown
    assert run("id", "backup", copy, "--home", here).exit_code == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert "exists" in run("id", "backup", copy, "--home", here).stderr
    backed = json.loads(run("id", "backup", tmp_path / "two.txt", "--home", here, "--json").stdout)
    assert backed == {"peer": shown["peer"], "file": str(tmp_path / "two.txt"), "sealed": False}

    other = json.loads(run("id", "show", "--home", there, "--json").stdout)
    refused = run("id", "restore", copy, "--home", there)
    assert refused.exit_code == 2 and "--force" in refused.stderr
    assert run("id", "restore", copy, "--home", there, "--force").exit_code == 0
    assert json.loads(run("id", "show", "--home", there, "--json").stdout)["peer"] == shown["peer"]
    assert Path(other["file"] + "." + other["peer"][:12]).exists()
    assert run("id", "restore", copy, "--home", there).exit_code == 0  # the same key once more
    again = json.loads(run("id", "restore", copy, "--home", there, "--json").stdout)
    assert again == {"peer": shown["peer"], "file": other["file"], "aside": None}
    first = json.loads(run("id", "restore", copy, "--home", tmp_path / "new", "--force", "--json").stdout)
    assert first["peer"] == shown["peer"] and first["aside"] is None
    assert "cannot read" in run("id", "restore", tmp_path / "none", "--home", there).stderr


def test_a_sealed_copy_needs_its_passphrase(tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    run("id", "show", "--home", tmp_path / "a")
    words = ["id", "backup", str(copy), "--seal", "--home", str(tmp_path / "a")]
    assert CliRunner().invoke(app, words, input="open sesame\nopen sesame\n").exit_code == 0
    words = ["id", "backup", str(tmp_path / "other.txt"), "--seal", "--json", "--home", str(tmp_path / "a")]
    assert json.loads(CliRunner().invoke(app, words, input="open sesame\nopen sesame\n").stdout)["sealed"] is True
    words = ["id", "restore", str(copy), "--home", str(tmp_path / "b")]
    assert CliRunner().invoke(app, words, input="wrong\n").exit_code == 2
    assert CliRunner().invoke(app, words, input="open sesame\n").exit_code == 0


# ---- errors that are no bugs, wherever they arise -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("tokenizer t.json has no ids for some text; give another"), "error: tokenizer t.json has no ids"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/lock"), "error: /x/lock cannot be used (Permission"),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x/y"),
            "error: /x/y cannot be used (Not a directory",
        ),
    ],
)
def test_a_disk_that_refuses_and_unfit_data_are_one_line(
    monkeypatch: pytest.MonkeyPatch, home: Path, error: Exception, said: str
) -> None:
    def pieces() -> Iterator[str]:
        yield "it wa"
        raise error

    monkeypatch.setattr("farflung.node.sampling.sample_swarm", lambda options: (1, pieces()))
    told = run("sample", "--home", home)
    assert told.exit_code == 2 and told.output.startswith("it wa") and said in told.output


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "Bad file descriptor"), ZeroDivisionError()])
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, home: Path, error: Exception) -> None:
    def broken(options: options.SampleOptions) -> None:
        raise error

    monkeypatch.setattr("farflung.node.sampling.sample_swarm", broken)
    told = run("sample", "--home", home)
    assert told.exit_code == 1 and told.exception is error


@pytest.mark.parametrize("command", ["status", "peers", "join alpha"])
def test_a_home_that_cannot_be_is_one_line(tmp_path: Path, command: str) -> None:
    told = run(*command.split(), "--home", tmp_path / ("a" * 300))
    assert told.exit_code == 2 and "cannot be used (File name too long): give another path" in told.stderr


def test_a_prompt_of_bytes_that_are_no_text_is_said(home: Path) -> None:
    told = run("sample", "--prompt", "a\udcff", "--home", home)
    assert told.exit_code == 2 and "--prompt is no UTF-8 text" in told.output


def test_the_version_is_said() -> None:
    assert run("--version").stdout.startswith("farflung 0.") and "protocol version" in run("--version").stdout


@pytest.mark.parametrize("memory", ["0", "-1", "inf", "nan"])
def test_memory_is_a_number(memory: str, home: Path) -> None:
    assert (
        "--memory must be above 0 and finite"
        in run("doctor", "--model", "1m", "--memory", memory, "--home", home).stderr
    )
