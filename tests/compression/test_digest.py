"""Names of bulk data."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from farflung.compression.digest import digest_of

OF_ABC = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
"""BLAKE3 of these three letters."""
OF_NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_it_is_blake3() -> None:
    assert digest_of(b"abc").hex() == OF_ABC
    assert digest_of().hex() == OF_NOTHING


@given(st.lists(st.binary(max_size=3000)))
def test_pieces_are_hashed_as_if_they_lay_together(pieces: list[bytes]) -> None:
    assert digest_of(*pieces) == digest_of(b"".join(pieces)) == digest_of(*map(memoryview, pieces))
    assert digest_of(*(bytearray(piece) for piece in pieces)) == digest_of(
        np.frombuffer(b"".join(pieces), np.uint8).data
    )
