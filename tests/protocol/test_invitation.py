"""Invitations and packed addresses: exact round trips, and what people are told about a bad paste."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.addresses import AddressPacker, AddressUnpacker, is_address
from farflung.protocol.errors import ConfigError, Malformed
from farflung.protocol.invitation import (
    PREFIX,
    Invitation,
    carried,
    decode_invitation,
    encode_invitation,
    is_invitation,
)
from farflung.protocol.keys import digest

ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
OTHER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESSES = (
    f"/ip4/203.0.113.7/tcp/31337/p2p/{ID}",
    f"/ip6/2001:db8::7/udp/31337/quic-v1/p2p/{ID}",
    f"/dns4/relay.example.org/tcp/443/wss/p2p/{OTHER_ID}/p2p-circuit/p2p/{ID}",
    "tls://203.0.113.7:41000",
    "tls://[2001:db8::7]:41000",
    "tls://peer.example.org:41000",
    f"/unix/strange/p2p/{ID}",
    "/ip4/010.0.0.1/tcp/80",
)
INVITATION = Invitation(name="tiny", swarm=b"s" * 32, founder=b"f" * 32, invite_seed=b"i" * 32, addresses=ADDRESSES)
TEXT = encode_invitation(INVITATION)


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decode_invitation(text)
    return str(caught.value)


def test_round_trip() -> None:
    assert decode_invitation(TEXT) == INVITATION


def test_survives_what_mail_and_chat_do() -> None:
    assert decode_invitation(f"  {TEXT[:50]}\n   {TEXT[50:].upper()}\r\n") == INVITATION


def test_size_with_one_address() -> None:
    one = Invitation(name="tiny", swarm=b"s" * 32, founder=b"f" * 32, invite_seed=b"i" * 32, addresses=ADDRESSES[:1])
    assert len(encode_invitation(one)) == 275


def test_secret_is_not_shown() -> None:
    assert "iiii" not in repr(INVITATION) and (b"i" * 32).hex() not in repr(INVITATION)


def test_complaints() -> None:
    assert "begins with 'farflung1'" in complaint("hello")
    assert "another version" in complaint("farflung2" + TEXT[9:])
    assert "cut short" in complaint(PREFIX)
    assert f"cut short: {len(TEXT) - 9 - 20} of {len(TEXT) - 9}" in complaint(TEXT[:-20])
    assert "3 characters too many" in complaint(TEXT + "abc")
    assert "'0' cannot stand" in complaint(TEXT[:-5] + "0" + TEXT[-4:])
    assert "mistyped" in complaint(TEXT[:60] + ("b" if TEXT[60] == "a" else "a") + TEXT[61:])
    assert "at most" in complaint(TEXT * 100)


@pytest.mark.parametrize("cut", range(0, len(TEXT) - 9, 7))
def test_every_cut_is_called_one(cut: int) -> None:
    assert "cut short" in complaint(TEXT[: 9 + cut])


@given(st.integers(9, len(TEXT) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_every_typo_is_found(at: int, char: str) -> None:
    if char != TEXT[at]:
        complaint(TEXT[:at] + char + TEXT[at + 1 :])


@given(st.binary(max_size=120))
def test_crafted_payloads_are_config_errors(payload: bytes) -> None:
    data = len(payload).to_bytes(2) + payload + digest("invitation", payload)[:4]
    complaint(PREFIX + base64.b32encode(data).decode().rstrip("=").lower())


@given(st.text())
def test_any_text_is_a_config_error(text: str) -> None:
    complaint(text)
    complaint(PREFIX + text)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "No"}, {"swarm": b""}, {"founder": b"x"}, {"invite_seed": b"x"},
        {"addresses": ("example.org:80",)}, {"addresses": ("tls://a:1",) * 17},
    ],
)  # fmt: skip
def test_values(values: dict[str, object]) -> None:
    good: dict[str, object] = {"name": "tiny", "swarm": bytes(32), "founder": bytes(32)}
    with pytest.raises(ConfigError):
        Invitation(**{**good, **values})  # type: ignore[arg-type]


def test_told_from_names() -> None:
    assert is_invitation(TEXT) and is_invitation("\n" + TEXT.upper())
    assert is_invitation(TEXT[:12]) and is_invitation(f" {TEXT[:73]}\n")
    assert not is_invitation("farflung1-run") and not is_invitation("farflung1abc@abcdefghijkl")
    assert not is_invitation("farflung1") and not is_invitation("tiny@abcdefghijkl")


def test_addresses_pack_well() -> None:
    packer = AddressPacker()
    sizes = [len(packer.pack(address)) for address in ADDRESSES]
    assert sizes == [49, 23, 101, 8, 20, 21, 1 + len(ADDRESSES[6]), 1 + len(ADDRESSES[7])]


@given(
    st.lists(
        st.one_of(
            st.sampled_from(ADDRESSES),
            st.from_regex(r"\A/(ip4|ip6|dns|tcp|p2p|udp|quic|ws)/[!-~]{1,30}(/[a-z0-9/]{1,20})?\Z"),
            st.from_regex(r"\Atls://[a-z0-9.:\[\]]{1,20}:[0-9]{1,6}\Z"),
        ),
        max_size=5,
    )
)
def test_packed_addresses_come_back_exactly(addresses: list[str]) -> None:
    packer, unpacker = AddressPacker(), AddressUnpacker()
    assert [unpacker.unpack(packer.pack(address)) for address in addresses] == addresses


@given(st.binary(max_size=60))
def test_noise_is_an_address_or_malformed(noise: bytes) -> None:
    try:
        assert is_address(AddressUnpacker().unpack(noise))
    except Malformed:
        pass  # the only error allowed


@pytest.mark.parametrize(
    "text", ["", "/", "tls://", "host:1", "/ip4/1.2.3.4 /tcp", "/ip4/\x1b[2J", "/ip4/" + "1" * 300]
)
def test_no_addresses(text: str) -> None:
    assert not is_address(text)


def test_what_a_peer_says_that_is_no_address_keeps_nobody_from_inviting() -> None:
    said = ("/ip4/1.2.3.4/tcp/1 x", "/" + 300 * "a", "tls://203.0.113.7:41000", "", ADDRESSES[0])
    invitation = Invitation(
        name="alpha", swarm=digest("swarm", b""), founder=digest("founder", b""), addresses=(*carried(said),)
    )
    assert decode_invitation(encode_invitation(invitation)).addresses == (ADDRESSES[0],)
