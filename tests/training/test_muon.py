"""Muon against its formula written out, and against torch's."""

import pytest
import torch
from torch import Tensor, nn

from farflung.training import muon
from farflung.training.muon import Muon, orthogonalise

SHAPES = [(48, 32), (32, 48), (32, 32), (48, 32)]


def gradient(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(gradient(shape, seed)) for seed, shape in enumerate(SHAPES)]


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 6) -> None:
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient((parameter.shape[0], parameter.shape[1]), 100 * step + index)
        optimizer.step()


def test_singular_values_become_about_one() -> None:
    for shape in SHAPES:
        x = gradient(shape, 0)
        values = torch.linalg.svdvals(orthogonalise(x))
        assert 0.3 < float(values.min()) and float(values.max()) < 1.3 and 0.7 < float(values.median()) < 1.2
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        assert float((orthogonalise(x) * (u @ v)).sum()) / min(shape) > 0.7  # the same singular vectors
    assert not orthogonalise(torch.zeros(3, 4)).any()


def test_a_batch_is_its_matrices() -> None:
    batch = torch.stack([gradient((12, 20), seed) for seed in range(5)])
    for matrix, together in zip(batch, orthogonalise(batch), strict=True):
        torch.testing.assert_close(orthogonalise(matrix), together, rtol=1e-4, atol=1e-5)
    assert orthogonalise(batch.view(5, 1, 12, 20)).shape == (5, 1, 12, 20)


def test_the_formula_written_out() -> None:
    """The golden trajectory: one matrix at a time, in the words of the module, in double precision."""

    def reference(w: Tensor, gradients: list[Tensor], lr: float, mu: float, decay: float) -> Tensor:
        momentum = torch.zeros_like(w)
        for g in gradients:
            momentum = mu * momentum + (1 - mu) * g
            ahead = mu * momentum + (1 - mu) * g
            x = ahead.T if ahead.shape[0] > ahead.shape[1] else ahead
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if ahead.shape[0] > ahead.shape[1] else x
            w = (1 - lr * decay) * w - lr * 0.2 * max(w.shape) ** 0.5 * x
        return w

    parameters = matrices()
    starts = [parameter.detach().double() for parameter in parameters]
    train(Muon(parameters, 0.05, momentum=0.9, weight_decay=0.3), parameters)
    for index, (shape, start, parameter) in enumerate(zip(SHAPES, starts, parameters, strict=True)):
        gradients = [gradient(shape, 100 * step + index).double() for step in range(6)]
        expected = reference(start, gradients, 0.05, 0.9, 0.3)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=2e-5)
        assert float((expected - start).abs().max()) > 0.05


def test_in_bf16_it_is_torchs() -> None:
    ours, theirs = matrices(), matrices()
    train(Muon(ours, 0.02, weight_decay=0.1, dtype=torch.bfloat16), ours)
    train(torch.optim.Muon(theirs, 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), theirs)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=6 * 0.02 * 0.02)  # 2 % of the six updates' size


def test_the_products_are_in_what_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def has_bf16(device: torch.device) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr(muon, "has_bf16", has_bf16)
    left, forced = matrices(), matrices()
    train(Muon(left, 0.02), left)
    train(Muon(forced, 0.02, dtype=torch.bfloat16), forced)
    assert all(torch.equal(one, other) for one, other in zip(left, forced, strict=True))
    assert set(asked) == {left[0].device}


def test_the_update_has_adamws_size_in_every_shape() -> None:
    for shape in ((256, 32), (32, 256), (96, 96)):
        matrix = nn.Parameter(torch.zeros(shape))
        train(Muon([matrix], 1.0, weight_decay=0.0), [matrix], steps=1)
        assert 0.14 < float(matrix.detach().square().mean().sqrt()) < 0.23


def test_what_has_no_gradient_stays() -> None:
    first, second = matrices()[0], matrices()[3]
    first.grad = gradient((48, 32), 9)
    before = second.detach().clone()
    Muon([first, second], 0.1).step()
    assert torch.equal(second, before)


def test_only_matrices() -> None:
    with pytest.raises(ValueError, match=r"\(5,\)"):
        Muon([nn.Parameter(torch.zeros(5))])
    with pytest.raises(ValueError, match="momentum"):
        Muon(matrices(), momentum=1.0)
