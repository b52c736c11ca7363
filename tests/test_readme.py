"""Every command of the README runs, in a block or in the middle of a sentence.

What takes seconds runs here as it stands, with real words for the placeholders. For the rest `ELSEWHERE` names tests: the first of each gives the same
command to the program, where that takes minutes with fewer seeds, smaller sizes, or flags that end it before the work; then the second does that work in
small. `pip install .` is only done as the wheel's test does it, beside dependencies that are there and fit what is declared. What `make` does is only
read here: `make test` runs this test, and `make demo` in a fresh checkout is tried by people.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.syntax import parsed
from tests.thorough import mostly

from farflung.training.methods import DEFAULT, LONG_DEFAULT, LONG_RUN

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
README = re.sub(r"^```ini\n.*?^```\n", "", README, flags=re.DOTALL | re.MULTILINE)  # no commands
FENCE = re.compile(r"^```\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
IN_BLOCKS = [" ".join(line.partition("#")[0].split()) for block in FENCE.findall(README) for line in block.splitlines()]
IN_SENTENCES = {
    " ".join(command.split()) for command in re.findall(r"`((?:farflung|make)\s[^`]+)`", FENCE.sub("", README))
}

SWARM = [
    "farflung create my-swarm --preset 1m --data python --steps 20000",
    "farflung doctor my-swarm",
    "farflung join my-swarm",
    "farflung status",
    "farflung peers",
    "farflung ledger",
    "farflung invite",
    "farflung id backup my-key",
    "farflung id restore my-key",
    "farflung id show",
    "farflung join farflung1...",
    "farflung join INVITATION --home second --local",
    "farflung leave",
    "farflung export my-swarm model",
    "farflung eval my-swarm",
    "farflung sample my-swarm --prompt 'def '",
    "farflung forget my-swarm --yes",
]
"""One after another, with the node that the third starts."""

ALONE = {
    "farflung create NAME --stages 4 --batch-tokens 65536 --microbatches 8": "swarm name founded",
    "farflung doctor --model 1b": "973.7 M parameters",
    "farflung sim run straggler": "rounds >= 100",
}
"""What each says, whether or not a model of a billion parameters fits this machine."""

ELSEWHERE = {
    "pip install .": ["test_wheel.py::test_it_is_imported_from_where_it_is_installed"],
    "farflung demo": ["test_wheel.py::test_the_demo_keeps_its_promises"],
    "farflung bench overhead": [
        "sims/test_main.py::test_benchmarks_are_called",
        "sims/test_bench.py::test_a_node_beside_a_loop",
    ],
    "farflung bench round": [
        "sims/test_main.py::test_benchmarks_are_called",
        "sims/test_bench.py::test_rounds_of_real_peers",
    ],
    "farflung bench quality": [
        "sims/test_main.py::test_a_bench_of_what_does_not_exist_says_what_does",
        "sims/test_quality_table.py::test_the_whole_command_and_its_second_time",
    ],
    "farflung bench pipeline": [
        "sims/test_bench_pipeline.py::test_a_page_has_both_parts",
        "sims/test_bench_pipeline.py::test_processes_learn_what_one_process_learns",
    ],
    "farflung sim list": ["sims/test_sim_run.py::test_shipped_scenarios_are_listed"],
    "farflung sim bandwidth": ["sims/test_bandwidth.py::test_the_command"],
    "farflung sim fuzz": ["sims/test_fuzzing.py::test_what_is_broken_is_found_made_small_and_played_from_its_file"],
    "farflung sim replay": ["sims/test_sim_run.py::test_a_violation_is_written_down_and_played_again"],
    "farflung sim local": ["sims/test_local.py::test_three_processes_train_one_is_killed_and_all_of_it_is_told"],
    "farflung sim report FOLDER...": ["sims/test_report.py::test_several_runs_side_by_side"],
    "farflung sim plan": ["sims/test_plan.py::test_the_command_says_the_agreed_keys"],
}
MAKE = {"make demo": "farflung demo --out", "make test": "-m pytest", "make thorough": "-m thorough"}
"""What each would run."""


def farflung(command: str) -> list[str]:
    program, *words = shlex.split(command)
    assert program == "farflung"
    return [sys.executable, "-P", "-m", "farflung.sims.main", *words]


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        farflung(command),
        cwd=folder,
        env=os.environ | {"FARFLUNG_HOME": str(folder / "home"), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target
    for folder in re.findall(r"^\| `(\w+)/` \|", README, flags=re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_the_first_screen_is_picture_figures_three_commands_and_the_tree() -> None:
    first = [line for line in README.splitlines() if line.startswith(("![", "|---", "```", "## "))][:6]
    assert [line[:2] for line in first] == ["![", "|-", "``", "``", "##", "|-"] and first[4] == "## The tree"
    assert IN_BLOCKS[:3] == ["pip install .", "farflung demo", "farflung join farflung1..."]


def test_bits_of_contributions_are_those_of_the_default_method() -> None:
    said = re.search(r"in one and a\nhalf bits a parameter \((\S+) in runs of (\S+) steps or more\)", README)
    assert said is not None and said[2] == f"{LONG_RUN:,}"
    assert (DEFAULT.codec, LONG_DEFAULT.codec) == ("deadzone(bits=1.5)", f"trellis(bits={said[1]})")


def test_every_command_has_a_test() -> None:
    assert {*IN_BLOCKS, *IN_SENTENCES} == {*SWARM, *ALONE, *ELSEWHERE, *MAKE}
    assert IN_BLOCKS[3:] == [command for command in SWARM if command in IN_BLOCKS[3:]], "in the order of the block"


def words_of(file: str, name: str) -> set[str]:
    """The strings in a test and in the functions of its file that it calls, or that those call."""
    functions = {
        node.name: node
        for node in parsed((ROOT / "tests" / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    nodes, seen = list(ast.walk(functions[name])), {name}
    for node in nodes:  # which grows
        if isinstance(node, ast.Name) and node.id in functions and node.id not in seen:
            seen.add(node.id)
            nodes += ast.walk(functions[node.id])
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_is_tested_elsewhere_is_there(command: str) -> None:
    found = [words_of(*test.split("::")) for test in ELSEWHERE[command]]
    wanted = {word for word in command.split()[1:] if word.isalpha() and word.islower()}
    assert wanted <= {word for text in found[0] for word in text.split()}


@pytest.mark.parametrize("command", MAKE)
def test_make_runs_what_it_is_said_to_run(command: str) -> None:
    shown = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert MAKE[command] in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", mostly(set(ALONE) - {"farflung sim run straggler"}, ALONE))
def test_a_command_runs_alone(tmp_path: Path, command: str) -> None:
    done = run(tmp_path, command.replace("NAME", "name"))
    refused = done.returncode == 2 and "usable are" in done.stderr
    assert done.returncode == 0 or (refused and "doctor" in command), done.stderr
    assert ALONE[command] in done.stdout + done.stderr


@contextmanager
def node(folder: Path, command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that `farflung join` starts; killed in the end if it still runs."""
    # `--local`, so that a test asks no router for anything.
    words = [*farflung(command), "--local", "--device", "cpu", "--threads", "1", "--no-live"]
    environment = os.environ | {"FARFLUNG_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_said(process: subprocess.Popen[bytes], output: Path, words: str) -> None:
    give_up_at = time.monotonic() + 240
    while words not in output.read_text():
        assert process.poll() is None and time.monotonic() < give_up_at, output.read_text()
        time.sleep(0.1)  # the node is another process: there is nothing to wait on but its output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_swarm_of_ones_own(tmp_path: Path) -> None:
    create, doctor, join, *asked, invited, second, leave, export, evaluate, sample, forget = SWARM
    made = run(tmp_path, create)
    assert made.returncode == 0, made.stderr
    (invitation,) = re.findall(r"farflung1[a-z2-7]{64,}", made.stdout)
    examined = run(tmp_path, doctor)
    assert examined.returncode == 0 and "train with: " in examined.stdout, examined.stderr
    output = tmp_path / "output.txt"
    with node(tmp_path, join, output) as founder:
        until_said(founder, output, "step 1 ")
        for command in asked:
            assert run(tmp_path, command).returncode == 0, command
        # Another machine finds the founder with the invitation that was printed before any node ran.
        assert second.replace("INVITATION", "farflung1...") == f"{invited} --home second --local"
        there = tmp_path / "second.txt"
        with node(tmp_path, second.replace("INVITATION", invitation), there) as other:
            until_said(other, there, "swarm my-swarm (")
            other.terminate()
            assert other.wait(120) == 0, there.read_text()
        left = run(tmp_path, leave)
        assert left.stdout == "left: asked to leave\n", left.stderr
        assert founder.wait(120) == 0, output.read_text()
    exported = run(tmp_path, export)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model" / "config.json").exists()
    judged = run(tmp_path, evaluate)
    assert judged.returncode == 0 and "perplexity" in judged.stdout, judged.stderr
    written = run(tmp_path, sample)
    assert written.returncode == 0 and written.stdout.startswith("def "), written.stderr
    forgotten = run(tmp_path, forget)
    assert forgotten.returncode == 0 and forgotten.stdout.startswith("forgotten: my-swarm"), forgotten.stderr
    assert "knows no swarm yet" in run(tmp_path, evaluate).stderr
