"""What pages of benchmarks say alike: the targets that each is held to, and the machine that measured."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One target and what was measured."""

    target: str
    measured: str
    met: bool | None
    """None: it cannot be told here."""
    untold: str = "not comparable"
    """What is said of it then."""

    @property
    def verdict(self) -> str:
        """For people."""
        return self.untold if self.met is None else "met" if self.met else "missed"

    @property
    def line(self) -> str:
        """Of a table in Markdown: target, measured, verdict; bold unless met."""
        return f"| {self.target} | {self.measured} | {self.verdict if self.met else f'**{self.verdict}**'} |"


def machine(
    device: str = "cpu",  # as torch names it; cpu or cuda
) -> str:
    """The processor or GPU, and the versions that figures depend on, in words."""
    computes = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor()
    return f"{computes}, Python {platform.python_version()}, torch {torch.__version__}"


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
