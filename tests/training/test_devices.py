"""What devices can do, by what torch says of them: there are none of these here."""

from types import SimpleNamespace

import pytest
import torch

from farflung.training.devices import has_bf16
from farflung.training.muon import products_dtype
from farflung.training.runtime import Runtime


@pytest.mark.parametrize(
    ("name", "major", "hip", "expected"),
    [
        ("cuda:1", 8, None, True),
        ("cuda:1", 7, None, False),  # which only emulates it
        ("cuda:1", 7, "6.4", True),
        ("mps", 9, None, False),
        ("cpu", 9, None, False),
    ],
)
def test_products_are_in_bf16_where_the_device_computes_in_it(
    name: str, major: int, hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the model and those of Muon alike; it is this device that is asked, not the current one."""
    asked = {torch.device("cuda:1"): SimpleNamespace(major=major)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked[device])
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_bf16(torch.device(name)) is expected
    assert (Runtime.best(name).autocast is torch.bfloat16) is expected
    assert (products_dtype(torch.device(name)) is torch.bfloat16) is expected
