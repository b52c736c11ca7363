"""Names: a full one means its founder, a bare one alone means nobody."""

import pytest

from farflung.protocol.errors import ConfigError, NameContested
from farflung.protocol.keys import fingerprint
from farflung.protocol.naming import NameClaim, check_free, check_name, full_name, resolve, split_name

ALICE, BOB, US = b"a" * 32, b"b" * 32, b"u" * 32


def claim(founder: bytes, swarm: bytes = b"1" * 32, *, seq: int = 1, name: str = "tiny") -> NameClaim:
    return NameClaim(name=name, founder=founder, swarm=swarm, seq=seq, expires_at=1e9)


@pytest.mark.parametrize("name", ["a", "tiny", "7b-run_2.1", "x" * 64])
def test_good_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", "-a", ".a", "A", "a b", "a@b", "a/b", "é", "a\n", "x" * 65])
def test_bad_names(name: str) -> None:
    with pytest.raises(ConfigError, match="swarm name"):
        check_name(name)


def test_a_bare_name_is_not_enough_even_with_one_claim() -> None:
    with pytest.raises(NameContested) as caught:
        resolve("tiny", [claim(ALICE)])
    assert f"farflung join {full_name('tiny', ALICE)}" in str(caught.value)


def test_contested_name_lists_all_claimants() -> None:
    with pytest.raises(NameContested) as caught:
        resolve("tiny", [claim(ALICE), claim(BOB), claim(US, name="other")])
    said = str(caught.value)
    assert full_name("tiny", ALICE) in said and full_name("tiny", BOB) in said and "Type the full name" in said
    assert fingerprint(US)[:10] not in said


def test_a_full_name_is_its_founders_latest_claim() -> None:
    claims = [claim(BOB, seq=99), claim(ALICE, seq=2), claim(ALICE, b"2" * 32, seq=3), claim(ALICE, seq=1)]
    for text in (full_name("tiny", ALICE), f" TINY@{fingerprint(ALICE)} "):
        assert resolve(text, claims) == claims[2]


def test_equal_sequences_resolve_alike_in_any_order() -> None:
    claims, text = [claim(ALICE, b"1" * 32), claim(ALICE, b"2" * 32)], full_name("tiny", ALICE)
    assert resolve(text, claims) == resolve(text, claims[::-1]) == claims[1]


@pytest.mark.parametrize("text", ["tiny", "tiny@" + fingerprint(US)[:12]])
def test_nobody_claims_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no claim to .*--peer ADDRESS.*invitation"):
        resolve(text, [])


def test_the_founder_is_silent_and_others_are_not() -> None:
    with pytest.raises(ConfigError, match=f"others claim {full_name('tiny', BOB)}"):
        resolve(full_name("tiny", ALICE), [claim(BOB)])


@pytest.mark.parametrize(
    "text", ["tiny@", "tiny@abcdefghi", "tiny@abcdefghi1", "tiny@" + "a" * 53, "tiny@abc@defghijk"]
)
def test_bad_fingerprints(text: str) -> None:
    with pytest.raises(ConfigError, match="after '@'"):
        split_name(text)


def test_free_names() -> None:
    check_free("tiny", [], US)
    check_free("tiny", [claim(ALICE, name="other")], US)
    check_free("tiny", [claim(US, b"9" * 32)], US, swarm=b"9" * 32)
    with pytest.raises(NameContested, match=f"claimed already by {full_name('tiny', ALICE)}"):
        check_free("tiny", [claim(ALICE), claim(US)], US)
    with pytest.raises(ConfigError, match="is yours already"):
        check_free("tiny", [claim(US, b"9" * 32)], US)
    with pytest.raises(ConfigError, match="swarm name"):
        check_free("Tiny", [], US)


def test_a_flood_of_claims_is_not_listed_in_full() -> None:
    with pytest.raises(NameContested, match="and 92 more"):
        resolve("tiny", [claim(bytes([i]) * 32) for i in range(100)])
