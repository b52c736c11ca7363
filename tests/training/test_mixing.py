"""Mixing (Streaming DiLoCo's alpha) in what a node trains with, against the benchmark's row of the same mathematics, to the bit."""

import pytest
import torch
from torch import Tensor

from farflung.training.coupled import Coupled
from farflung.training.fragments import Fragment
from farflung.training.late import mix_
from farflung.training.rules import Nesterov, advance_, empty_buffers

N = 60
HALF = (20, 60)
RULE = Nesterov(lr=0.4, momentum=0.9)
ALPHA = 0.5


class Vector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, N))


def random(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).mul_(0.01)


def coupled(mix: float | None) -> Coupled:
    return Coupled(Vector(), RULE, device=torch.device("cpu"), mix=mix)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7])
def test_the_rows_of_the_benchmark_to_the_bit(alpha: float) -> None:
    """Two peers, fragments in turn, a step between sending and applying: as `sims.quality_train.Rounds` moves them."""
    peers = [coupled(alpha) for _ in range(2)]
    params = torch.linspace(-1.0, 1.0, N)
    locals_ = [params.clone() for _ in peers]
    buffers = empty_buffers(RULE, params)
    for round_ in range(8):
        start, stop = ((0, 20), HALF)[round_ % 2]
        part = Fragment(((start, stop),))
        for m, (peer, local) in enumerate(zip(peers, locals_, strict=True)):
            peer.parameters[0].sub_(random(100 * round_ + m))
            local.sub_(random(100 * round_ + m))
            peer.offer()
        deltas = [part.take(params) - part.take(local) for local in locals_]
        assert all(torch.equal(p.offered_gradient(start, stop), d) for p, d in zip(peers, deltas, strict=True))
        mean = torch.stack(deltas).mean(dim=0)
        for m, (peer, local) in enumerate(zip(peers, locals_, strict=True)):
            peer.parameters[0].sub_(random(7000 * round_ + m))
            local.sub_(random(7000 * round_ + m))
        advance_(RULE, params, buffers, part, mean)
        for peer, local in zip(peers, locals_, strict=True):
            peer.apply([(start, stop, mean)], contributed=True)
            moved = part.take(local)
            mix_(moved, part.take(params), alpha)
            part.put_(local, moved)
            assert torch.equal(peer.parameters[0], local)
            assert torch.equal(peer.outer.params, params) and torch.equal(peer.outer.momentum, buffers[0])


def test_what_was_offered_meanwhile_moves_alike() -> None:
    peer = coupled(ALPHA)
    peer.parameters[0].sub_(random(1))
    peer.pseudo_gradient()
    peer.parameters[0].sub_(random(2))
    peer.offer()  # nothing is trained after it, so the offer and the parameters stay one
    peer.apply([(*HALF, random(3, 40))], contributed=True)
    assert peer.offered is not None
    assert torch.equal(peer.offered.values, peer.parameters[0])
    assert torch.equal(peer.pseudo_gradient(), peer.outer.params - peer.parameters[0])


def test_who_did_not_contribute_keeps_all_its_progress() -> None:
    mixing, rebasing = coupled(ALPHA), coupled(None)
    for peer in (mixing, rebasing):
        peer.parameters[0].sub_(random(1))
        peer.apply([(*HALF, random(3, 40))], contributed=False)
    assert torch.equal(mixing.parameters[0], rebasing.parameters[0])
    assert torch.allclose(mixing.pseudo_gradient(), random(1), atol=1e-6)


def test_what_a_codec_left_out_cannot_stay_there() -> None:
    peer = coupled(ALPHA)
    peer.pseudo_gradient()
    before, outer = peer.parameters[0].clone(), peer.outer.digest()
    with pytest.raises(ValueError, match="that are mixed"):
        peer.apply([(*HALF, random(3, 40))], contributed=True, told={20: random(4, 40)})
    assert torch.equal(peer.parameters[0], before) and peer.outer.digest() == outer and peer.sent is not None
