"""Every command of the README runs, as it stands there."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
COMMANDS = [line.partition("#")[0].split() for block in BLOCKS for line in block.splitlines()]

ELSEWHERE = {
    ("pip", "install", "."),  # tests/test_wheel.py
    ("farflung", "demo"),  # tests/test_wheel.py
    ("farflung", "join", "farflung1..."),  # tests/node/test_daemon.py
}


def farflung(folder: Path, words: list[str]) -> list[str]:
    assert words[0] == "farflung"
    return [sys.executable, "-P", "-m", "farflung.sims.main", *words[1:]]


def run(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        farflung(folder, words),
        cwd=folder,
        env=os.environ | {"FARFLUNG_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target
    for folder in re.findall(r"^\| `(\w+)/` \|", text, flags=re.MULTILINE):
        assert (ROOT / folder).is_dir()


@pytest.mark.slow
def test_every_command_of_the_readme(tmp_path: Path) -> None:
    todo = [words for words in COMMANDS if tuple(words) not in ELSEWHERE]
    wanted = ["create", "doctor", "join", "status", "peers", "invite", "leave", "export", "eval"]
    assert [words[1] for words in todo] == wanted
    made = run(tmp_path, todo[0])
    assert made.returncode == 0, made.stderr
    examined = run(tmp_path, todo[1])
    assert examined.returncode == 0 and "train with: " in examined.stdout, examined.stderr
    # `--local`, so that a test asks no router for anything.
    words = [*farflung(tmp_path, todo[2]), "--local", "--device", "cpu", "--threads", "1", "--no-live"]
    environment = os.environ | {"FARFLUNG_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        node = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        give_up_at = time.monotonic() + 80
        while "step 1 " not in output.read_text():
            assert node.poll() is None and time.monotonic() < give_up_at, output.read_text()
            time.sleep(0.1)  # the node is another process: there is nothing to wait on but its output
        for words in todo[3:6]:
            assert run(tmp_path, words).returncode == 0, shlex.join(words)
        left = run(tmp_path, todo[6])
        assert left.stdout == "left: asked to leave\n", left.stderr
        assert node.wait(30) == 0, output.read_text()
    finally:
        node.kill()
        node.wait()
    exported = run(tmp_path, todo[7])
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model" / "config.json").exists()
    judged = run(tmp_path, todo[8])
    assert judged.returncode == 0 and "perplexity" in judged.stdout, judged.stderr
