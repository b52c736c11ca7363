"""Limits of containers, read from folders that look like the system's."""

from pathlib import Path

import psutil
import pytest
import torch

from farflung.training import host_memory
from farflung.training.host_memory import available_bytes, room_in_groups
from farflung.training.memory import free_bytes

UNLIMITED_V1 = 9223372036854771712


class System:
    """A process and what is mounted."""

    def __init__(self, folder: Path) -> None:
        self.process = folder / "process"
        self.process.mkdir()
        self.mounts = folder / "mounts"
        (self.process / "mountinfo").write_text("24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n")

    def belongs_to(self, *lines: str) -> None:
        (self.process / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, name: str, kind: str, options: str, root: str = "/") -> None:
        with (self.process / "mountinfo").open("a") as file:
            file.write(f"31 24 0:26 {root} {self.mounts / name} rw,nosuid - {kind} cgroup {options}\n")

    def group(self, path: str, **figures: object) -> None:
        """Files of one group; `stat` is the text of memory.stat."""
        folder = self.mounts / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            (folder / f"memory.{name}").write_text(f"{figure}\n")


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_version_2_the_tightest_limit_on_the_way_up_binds(system: System) -> None:
    system.belongs_to("0::/a/b/c")
    system.mount("all", "cgroup2", "rw,nsdelegate")
    system.group("all/a/b/c", max="max", current=10)
    system.group("all/a/b", max=1000, current=300)
    system.group("all/a", max=1500, current=1100)
    system.group("all/other", max=5, current=0)
    assert room_in_groups(system.process) == 400
    system.group("all/a", max="max", current=1100)
    assert room_in_groups(system.process) == 700
    system.group("all/a/b", max="max", current=300)
    assert room_in_groups(system.process) is None


def test_version_2_in_a_container_whose_group_looks_like_the_root(system: System) -> None:
    for path in ("/", "/../../elsewhere"):
        system.belongs_to(f"0::{path}")
        (system.process / "mountinfo").write_text("")
        system.mount("all", "cgroup2", "rw")
        system.group(".", max=1, current=0)  # not mounted
        system.group("all", max=1000, current=900, stat="anon 500\nfile 350\nactive_file 50\ninactive_file 300")
        assert room_in_groups(system.process) == 400  # cache that is not in use is free


def test_a_group_above_its_limit_has_no_room(system: System) -> None:
    system.belongs_to("0::/")
    system.mount("all", "cgroup2", "rw")
    system.group("all", max=1000, current=1200)
    assert room_in_groups(system.process) == 0


def test_version_1_counts_only_the_controller_of_memory(system: System) -> None:
    system.belongs_to("5:cpu,cpuacct:/tight", "4:memory:/docker/abc/inner", "1:name=systemd:/x", "0::/")
    system.mount("cpu", "cgroup", "rw,cpu,cpuacct")
    system.mount("memory", "cgroup", "rw,memory", root="/docker/abc")  # as a container without a namespace sees it
    system.mount("unified", "cgroup2", "rw")
    system.group("unified")
    system.group("cpu/tight", limit_in_bytes=1, usage_in_bytes=0)
    stat = "inactive_file 1\ntotal_inactive_file 100"
    system.group("memory/inner", limit_in_bytes=800, usage_in_bytes=500, stat=stat)
    system.group("memory", limit_in_bytes=UNLIMITED_V1, usage_in_bytes=10)
    assert room_in_groups(system.process) == 400
    system.group("memory", limit_in_bytes=700, usage_in_bytes=500, stat=stat)
    assert room_in_groups(system.process) == 300


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert room_in_groups(tmp_path) is None


def test_what_is_free_is_the_lesser_of_host_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "room_in_groups", lambda: 12345)
    assert available_bytes() == free_bytes(torch.device("cpu")) == 12345
    monkeypatch.setattr(host_memory, "room_in_groups", lambda: 1 << 60)
    assert 0 < available_bytes() <= psutil.virtual_memory().total
