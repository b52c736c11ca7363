"""Losses whose logits are looked at in pieces: the bits of one piece, with and without z-loss, and no more memory than was said."""

import pytest
import torch
import torch.nn.functional as F
from tests.training.allocations import peak_bytes
from torch import Tensor

from farflung.training import model, of_targets
from farflung.training.model import losses, next_token_loss

SHAPE = (3, 7, 50)
"""Sequences, tokens, vocabulary: 21 rows, which no number of pieces divides evenly."""


@pytest.fixture(params=[1, 120, 400])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row (fewer logits than a row has), of two, and of three, as many as make `FEWEST`."""
    for module in (model, of_targets):
        monkeypatch.setattr(module, "PIECE", request.param)


def sample(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(SHAPE, generator=generator) * 5).to(dtype).requires_grad_()
    return logits, torch.randint(SHAPE[-1], SHAPE[:2], generator=generator)


def in_one_piece(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("in_pieces")
def test_the_cross_entropy_has_the_bits_of_torchs(dtype: torch.dtype) -> None:
    logits, targets = sample(dtype)
    loss, expected = next_token_loss(logits, targets), in_one_piece(logits, targets)
    assert torch.equal(loss, expected)
    found, wanted = (torch.autograd.grad(one * 0.3, logits)[0] for one in (loss, expected))
    assert found.dtype == dtype and torch.equal(found, wanted)
    with torch.no_grad():
        assert torch.equal(next_token_loss(logits, targets), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("in_pieces")
def test_the_z_loss_has_the_gradient_of_its_formula(dtype: torch.dtype) -> None:
    logits, targets = sample(dtype)
    loss, aim = losses(logits, targets, 0.01)
    assert torch.equal(loss, in_one_piece(logits, targets))
    exact = logits.detach().double().requires_grad_()
    log_z = exact.logsumexp(dim=-1)
    wanted = F.cross_entropy(exact.flatten(0, 1), targets.flatten()) + 0.01 * log_z.square().mean()
    torch.testing.assert_close(aim.double(), wanted, rtol=1e-6, atol=0.0)
    (found,), (expected,) = torch.autograd.grad(aim, logits), torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-7)


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [3, 33, 150])
def test_the_memory_is_what_was_said(num_tokens: int, dtype: torch.dtype, z_loss: float) -> None:
    """Fewer logits than a piece, some more, and many."""
    targets, vocab_size = torch.zeros(1, num_tokens, dtype=torch.int64), 1 << 17
    assert vocab_size * 32 == of_targets.PIECE

    def both_passes() -> None:
        leaf = torch.zeros(1, num_tokens, 1, dtype=dtype, requires_grad=True)
        _, aim = losses(leaf.expand(-1, -1, vocab_size).contiguous(), targets, z_loss)
        aim.backward()  # type: ignore[no-untyped-call]

    said = of_targets.peak_bytes(num_tokens * vocab_size, dtype.itemsize)
    assert 0.99 < said / peak_bytes(both_passes) < (1.01 if num_tokens == 150 else 2.3)  # few bytes, if too many
