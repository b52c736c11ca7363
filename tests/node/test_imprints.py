"""What peers remember of the stages before and after theirs, and how it comes to whoever makes such a stage anew."""

import asyncio
from typing import Any

import torch
from tests.node.lab import Lab, in_lab, peer

from farflung.compression.codec import Payload
from farflung.compression.wire import HEADER_NBYTES
from farflung.node import framing
from farflung.node.imprints import (
    KIND,
    MICROBATCHES,
    STEPS,
    Imprint,
    Imprints,
    Remembered,
    gather_pairs,
    serve_imprints,
)
from farflung.node.network import Stream
from farflung.protocol.errors import Malformed, Refused, RemoteError
from farflung.protocol.headers import BulkHeader, Imprinted, ImprintKey, ImprintList, ImprintListRequest, ImprintRequest
from farflung.protocol.imprint_pairs import PAIRS
from farflung.protocol.limits import MAX_IMPRINTS
from farflung.protocol.messages import encode
from farflung.training.pipeline_boundary import Boundary
from farflung.training.recovery_fit import Pair

WIDTH, LENGTH = 4, 8
BOUNDARY = Boundary.parse("fp32", WIDTH)
STEP = 7


def activation(seed: int, batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.sin(torch.arange(batch * length * WIDTH) * (1.0 + seed)).view(batch, length, WIDTH)


def imprint(x: torch.Tensor) -> Imprint:
    return Imprint(x.shape[0], x.shape[1], BOUNDARY.encode(x))


def key(step: int, microbatch: int) -> ImprintKey:
    return ImprintKey(step, bytes([step]) * 32, microbatch)


class Neighbour:
    """A node that remembers."""

    def __init__(self, lab: Lab, number: int, *, admits: bool = True, boundary: Boundary = BOUNDARY) -> None:
        self.imprints = Imprints()
        self.node = lab.nodes[number]
        self.errors: list[RemoteError] = []
        serve_imprints(
            self.node.network, self.imprints, boundary, self.node.doors.side, lambda _: admits, self.errors.append
        )

    def keep(self, x: torch.Tensor, microbatch: int = 0, *, output: bool, step: int = STEP) -> None:
        self.imprints.keep(1, key(step, microbatch), imprint(x), output=output)


async def remembered(lab: Lab, *neighbours: int) -> tuple[Remembered, list[RemoteError]]:
    """What node 0 gets of stage 1."""
    node, errors = lab.nodes[0], list[RemoteError]()
    found = await gather_pairs(
        node.network,
        [peer(number) for number in neighbours],
        1,
        BOUNDARY,
        LENGTH,
        reached=STEP + 1,
        side=node.doors.side,
        refused=errors.append,
    )
    return found, errors


async def gathered(lab: Lab, *neighbours: int) -> tuple[list[Pair], list[RemoteError]]:
    found, errors = await remembered(lab, *neighbours)
    return list(found.pairs), errors


def test_the_first_microbatches_of_the_last_steps_are_kept() -> None:
    kept, one = Imprints(), imprint(activation(0))
    for step in range(5):
        for microbatch in range(10):
            kept.keep(1, key(step, microbatch), one, output=True)
    keys = kept.keys(1, output=True)
    assert keys == tuple(key(s, m) for s in range(5 - STEPS, 5) for m in range(MICROBATCHES))
    assert len(keys) == MAX_IMPRINTS and len(encode(ImprintList(keys, keys))) <= framing.MAX_HEADER_BYTES
    assert kept.keys(1, output=False) == kept.keys(2, output=True) == ()
    assert kept.get(ImprintRequest(1, True, keys[0])) is one
    assert kept.get(ImprintRequest(1, False, keys[0])) is None
    assert kept.get(ImprintRequest(1, True, key(0, 0))) is None


def test_each_stage_has_steps_of_its_own() -> None:
    """What was kept of a stage stays while only others have steps: it is then that it is needed."""
    kept, one = Imprints(), imprint(activation(0))
    kept.keep(1, key(0, 0), one, output=False)
    for step in range(1, 9):
        kept.keep(2, key(step, 0), one, output=False)
    assert kept.keys(1, output=False) == (key(0, 0),)


def test_stage_0_is_never_made_anew() -> None:
    kept = Imprints()
    kept.keep(0, key(STEP, 0), imprint(activation(0)), output=True)
    assert kept.keys(0, output=True) == ()


def test_pairs_are_put_together_from_both_sides() -> None:
    async def story(lab: Lab) -> None:
        before, after, other = Neighbour(lab, 1), Neighbour(lab, 2), Neighbour(lab, 3)
        for microbatch in range(3):
            before.keep(activation(microbatch), microbatch, output=False)
        after.keep(activation(10), 0, output=True)
        other.keep(activation(12), 2, output=True)
        other.keep(activation(13), 3, output=True)  # whose input nobody has
        pairs, errors = await gathered(lab, 1, 2, 3, 4)  # the last one is not there at all
        assert not errors and len(pairs) == 2
        for (x, y), seed in zip(pairs, (0, 2), strict=True):
            assert torch.equal(x, activation(seed)) and torch.equal(y, activation(10 + seed))

    in_lab(4, story)


def test_a_peer_that_has_both_sides_is_enough_and_there_are_not_too_many() -> None:
    async def story(lab: Lab) -> None:
        both = Neighbour(lab, 1)
        for step in range(STEPS):
            for microbatch in range(MICROBATCHES):
                for output in (False, True):
                    both.keep(activation(microbatch), microbatch, output=output, step=STEP - step)
        pairs, _ = await gathered(lab, 1)
        assert len(pairs) == PAIRS < STEPS * MICROBATCHES

    in_lab(4, story)


def test_pairs_of_long_ago_are_no_pairs_beside_new_ones() -> None:
    async def story(lab: Lab) -> None:
        before, late, after = Neighbour(lab, 1), Neighbour(lab, 2), Neighbour(lab, 3)
        for one, step in ((before, 1), (late, STEP)):
            for microbatch in range(2):
                one.keep(activation(step), microbatch, output=False, step=step)
                after.keep(activation(step + 1), microbatch, output=True, step=step)
        found, _ = await remembered(lab, 1, 2, 3)
        assert found.judges and all(torch.equal(x, activation(STEP)) for x, _ in found.pairs) and len(found.pairs) == 2
        found, _ = await remembered(lab, 1, 3)
        assert not found.judges and len(found.pairs) == 2

    in_lab(4, story)


def test_the_first_sequence_of_each_is_sent() -> None:
    async def story(lab: Lab) -> None:
        both = Neighbour(lab, 1)
        both.keep(activation(0, batch=5), output=False)
        both.keep(activation(1, batch=5), output=True)
        [(x, y)], _ = await gathered(lab, 1)
        assert torch.equal(x, activation(0, batch=5)[:1]) and torch.equal(y, activation(1, batch=5)[:1])

    in_lab(4, story)


def test_halves_that_do_not_belong_together_are_no_pair() -> None:
    async def story(lab: Lab) -> None:
        before, after = Neighbour(lab, 1), Neighbour(lab, 2)
        before.keep(activation(0, length=LENGTH - 1), output=False)
        after.keep(activation(1), output=True)
        assert await gathered(lab, 1, 2) == ([], [])

    in_lab(4, story)


def test_what_can_be_decoded_but_not_encoded_again_is_not_handed_out() -> None:
    """Numbers that no codec's encoder lets through, as bytes: their sender could end whoever keeps them by asking for them."""
    boundary = Boundary.parse(f"tokenint8(width={WIDTH})", WIDTH)
    payload = bytearray(boundary.encode(torch.ones(1, LENGTH, WIDTH)))
    row = torch.tensor(2.0**125).bfloat16().view(torch.int16).numpy().tobytes() + b"\1" * WIDTH
    payload[HEADER_NBYTES:] = row * LENGTH
    whole = boundary.decode(payload, 1, LENGTH, device=torch.device("cpu"))
    assert bool((whole == 2.0**125).all())

    async def story(lab: Lab) -> None:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        both = Neighbour(lab, 1, boundary=boundary)
        for output in (False, True):
            both.imprints.keep(1, key(STEP, 0), Imprint(1, LENGTH, payload), output=output)
        assert await gathered(lab, 1) == ([], []) and not failed

    in_lab(4, story)


def test_who_is_not_admitted_gets_nothing() -> None:
    async def story(lab: Lab) -> None:
        shy = Neighbour(lab, 1, admits=False)
        for output in (False, True):
            shy.keep(activation(0), output=output)
        assert await gathered(lab, 1) == ([], [])
        [error] = shy.errors
        assert isinstance(error, Refused) and error.peer == peer(0)

    in_lab(4, story)


def lie(lab: Lab, header: BulkHeader, payload: Payload) -> None:
    """Node 2 says that it has what came out of the stage, and sends this."""

    async def serve(stream: Stream) -> None:
        request: BulkHeader = await framing.read_header(stream, ImprintListRequest, ImprintRequest)
        if isinstance(request, ImprintListRequest):
            await framing.write_header(stream, ImprintList((), (key(STEP, 0),)))
        else:
            await framing.write_with_header(stream, header, payload)
        await stream.close()

    lab.nodes[2].network.serve(KIND, serve)


def test_what_is_no_activation_is_refused_and_named() -> None:
    good = BOUNDARY.encode(activation(1))
    nan = bytes(good[:-4]) + b"\x00\x00\xc0\x7f"
    cases: list[tuple[BulkHeader, Payload, type[RemoteError]]] = [
        (Imprinted(LENGTH, len(good) - 4), good[:-4], Malformed),
        (Imprinted(LENGTH + 1, len(good)), good, Refused),
        (Imprinted(LENGTH, 1 << 40), good, Refused),
        (Imprinted(LENGTH, len(nan)), nan, RemoteError),
        (ImprintList((), ()), good, Refused),
    ]
    for header, payload, expected in cases:

        async def story(
            lab: Lab, header: BulkHeader = header, payload: Payload = payload, expected: type[RemoteError] = expected
        ) -> None:
            Neighbour(lab, 1).keep(activation(0), output=False)
            lie(lab, header, payload)
            pairs, [error] = await gathered(lab, 1, 2)
            assert pairs == [] and isinstance(error, expected) and error.peer == peer(2)

        in_lab(4, story)
