"""The owner's mean: its error against the exact one, and its bits whatever the thread count."""

import contextlib
import itertools
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from farflung.compression import kernels
from farflung.compression.aggregate import accumulate, reduce_part
from farflung.compression.codec import CodecError
from farflung.compression.feedback import ErrorFeedback
from farflung.compression.policy import uniform
from farflung.compression.registry import parse_codec
from farflung.compression.sign import Sign

COSINE = 0.475
"""Between the pseudo-gradients of two peers, as measured (compression digest, section 2)."""
NUMEL = 3 * (1 << 16) + 1000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workers(peers: int, numel: int = NUMEL) -> list[Tensor]:
    """Gaussian vectors with that cosine between any two."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(numel, generator=generator) * COSINE**0.5
    return [1e-4 * (common + torch.randn(numel, generator=generator) * (1 - COSINE) ** 0.5) for _ in range(peers)]


# Digest, section 2: 4.7e-5 for int8 both ways.
BUTTERFLIES = [
    ("int8(block=128)", "int8(block=128)", 4, 6.1e-5),
    ("int8(block=128)", "int8(block=128)", 16, 5e-5),
    ("int4(block=128)", "int8(block=128)", 8, 3.5e-3),
]


@pytest.mark.parametrize(("up", "down", "peers", "bound"), BUTTERFLIES)
def test_error_of_the_mean(up: str, down: str, peers: int, bound: float) -> None:
    uplink, downlink = parse_codec(up), parse_codec(down)
    vectors = workers(peers)
    payload = reduce_part(NUMEL, [(uplink.encode(x), 1.0 / peers) for x in vectors], uplink, downlink.encode)
    exact = torch.stack(vectors).double().mean(dim=0)
    error = downlink.decode(payload, NUMEL) - exact
    assert float(error.square().sum() / exact.square().sum()) <= bound


def test_the_same_bytes_for_every_thread_count() -> None:
    codec = parse_codec("int8(block=128)")
    payloads = [bytes(codec.encode(x)) for x in workers(4)]
    weights = [0.1, 0.2, 0.3, 0.4]
    results = set()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        contributions = list(zip(payloads, weights, strict=True))
        results.add(bytes(reduce_part(NUMEL, contributions, codec, codec.encode)))
    assert len(results) == 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels are there while the module's tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_library", None)
        prepared = kernels.prepare(tmp_path_factory.mktemp("cache"))
        assert prepared.native, prepared.reason
        yield


@pytest.mark.skipif(not any(map(shutil.which, kernels.COMPILERS)), reason="no C compiler")
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("up", "down", "peers"), [("int8", "int8", 16), ("int4", "int8", 8), ("deadzone(bits=1.0)", "int4", 3)]
)
def test_every_peers_bytes_are_the_same_in_eager_and_compiled_with_any_threads(up: str, down: str, peers: int) -> None:
    """From the contributions to what the mean decodes to."""
    numel = (1 << 16) + 1000
    uplink, downlink, vectors = parse_codec(up), parse_codec(down), workers(peers, numel)
    results = set()
    for native, threads in itertools.product((True, False), (1, 2)):
        torch.set_num_threads(threads)
        with contextlib.nullcontext() if native else kernels.without():
            payloads = [bytes(uplink.encode(x)) for x in vectors]
            mean = bytes(reduce_part(numel, [(p, 1.0 / peers) for p in payloads], uplink, downlink.encode))
            decoded = downlink.decode(mean, numel).numpy().tobytes()
        results.add((*payloads, mean, decoded))
    assert len(results) == 1


def test_the_sum_is_added_up_in_the_order_given() -> None:
    codec = parse_codec("int8(block=128)")
    payloads = [codec.encode(x) for x in workers(3, 1000)]
    weights = [0.5, 0.3, 0.2]
    expected = torch.zeros(1000)
    for payload, weight in zip(payloads, weights, strict=True):
        expected += codec.decode(payload, 1000) * weight
    total = accumulate(1000, zip(payloads, weights, strict=True), codec)
    assert torch.equal(total, expected)
    other = accumulate(1000, list(zip(payloads, weights, strict=True))[::-1], codec)
    assert not torch.equal(total, other), "another order, other bits"


def test_a_policys_slices_reduce_to_the_slices_of_the_mean() -> None:
    codec = parse_codec("int8(block=128)")
    flat = uniform(codec, 1024)
    vectors = workers(2, 1024)
    whole = reduce_part(1024, [(codec.encode(x), 0.5) for x in vectors], codec, codec.encode)
    for start, stop in ((0, 256), (256, 1024)):
        part = flat.part(start, stop)
        payload = reduce_part(stop - start, [(part.encode(x[start:stop]), 0.5) for x in vectors], part, part.encode)
        assert torch.equal(part.decode(payload, stop - start), codec.decode(whole, 1024)[start:stop])


def test_an_owner_with_feedback_owes_one_residual_at_most() -> None:
    """Downlink of signs only: over many rounds everybody gets the sum of the means, except what the owner still keeps."""
    uplink, flat = parse_codec("int8(block=128)"), uniform(Sign(block=64), 1024)
    owner, (start, stop) = ErrorFeedback(flat), (256, 768)
    exact, received = torch.zeros(512), torch.zeros(512)
    for _ in range(20):
        contributions = [(uplink.encode(x[start:stop]), 0.5) for x in workers(2, 1024)]
        exact += accumulate(512, contributions, uplink)
        owner.begin(b"round")
        payload = reduce_part(512, contributions, uplink, lambda mean: owner.encode_(mean, start))
        received += flat.part(start, stop).decode(payload, 512)
        owner.commit(b"round", [(start, stop)])
    torch.testing.assert_close(received + owner.memory[start:stop], exact, atol=1e-8, rtol=1e-4)
    assert float(owner.memory.norm()) < float(exact.norm()) / 4


def test_bad_contributions() -> None:
    codec = parse_codec("int8(block=128)")
    payload = bytes(codec.encode(workers(1, 500)[0]))
    with pytest.raises(CodecError):
        accumulate(500, [(payload, 0.5), (payload[:-1], 0.5)], codec)
    for weight in (float("nan"), float("inf"), -0.5):
        with pytest.raises(ValueError, match="weigh"):
            accumulate(500, [(payload, weight)], codec)
    assert accumulate(500, [], codec).eq(0).all()
