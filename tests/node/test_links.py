"""Which carrier the next stream takes, and what the rates count."""

import pytest

from farflung.node.links import (
    DIAL_RETRY_MAX_S,
    DIAL_RETRY_S,
    LIBP2P,
    MAX_PEERS,
    REPROBE_S,
    SKIP_SENT_BYTES,
    TLS,
    LinkBook,
)

PEER = b"p" * 32


def measured(book: LinkBook, carrier: str, rate: float) -> None:
    meter = book.meter(PEER, carrier)
    for _ in range(20):
        meter.received(int(rate), 1.0)


def test_tls_unless_it_cannot_be_dialled() -> None:
    book = LinkBook()
    assert book.choose(PEER, dialable=False, now=0.0) == LIBP2P
    assert book.choose(PEER, dialable=True, now=0.0) == TLS


def test_failed_dials_are_remembered_for_longer_each_time() -> None:
    book = LinkBook()
    book.dial_failed(PEER, 0.0)
    assert book.choose(PEER, dialable=True, now=DIAL_RETRY_S - 1) == LIBP2P
    assert book.choose(PEER, dialable=True, now=DIAL_RETRY_S + 1) == TLS
    book.dial_failed(PEER, 100.0)
    assert book.choose(PEER, dialable=True, now=100.0 + DIAL_RETRY_S + 1) == LIBP2P
    book.forget_failures(PEER)
    assert book.choose(PEER, dialable=True, now=100.0 + DIAL_RETRY_S + 1) == TLS


def test_a_peer_that_never_answers_is_dialled_for_weeks() -> None:
    book = LinkBook()
    for time in range(2000):  # a pause of a power of two would be no number any more
        book.dial_failed(PEER, time * DIAL_RETRY_MAX_S)
    last = 1999 * DIAL_RETRY_MAX_S
    assert book.choose(PEER, dialable=True, now=last + DIAL_RETRY_MAX_S - 1) == LIBP2P
    assert book.choose(PEER, dialable=True, now=last + DIAL_RETRY_MAX_S + 1) == TLS


def test_measurement_decides_and_the_loser_is_tried_again() -> None:
    book = LinkBook()
    assert book.choose(PEER, dialable=True, now=0.0) == TLS
    measured(book, TLS, 1e6)
    measured(book, LIBP2P, 1.1e6)
    assert book.choose(PEER, dialable=True, now=1.0) == TLS  # not enough better
    measured(book, LIBP2P, 3e6)
    assert book.choose(PEER, dialable=True, now=2.0) == LIBP2P
    assert book.choose(PEER, dialable=True, now=2.0 + REPROBE_S) == TLS
    assert book.choose(PEER, dialable=True, now=3.0 + REPROBE_S) == LIBP2P
    assert book.stats()[PEER].carrier == LIBP2P


def test_rates() -> None:
    book = LinkBook()
    book.choose(PEER, dialable=True, now=0.0)
    meter = book.meter(PEER, TLS)
    meter.sent(SKIP_SENT_BYTES, 1e-6)  # swallowed by buffers: no rate
    assert book.stats()[PEER].up_bytes_per_s == 0
    meter.sent(1_000_000, 0.5)
    assert book.stats()[PEER].up_bytes_per_s == pytest.approx(2e6)
    meter.received(100, 10.0)  # latency, no rate
    assert book.stats()[PEER].down_bytes_per_s == 0
    assert book.stats()[PEER].sent_bytes == SKIP_SENT_BYTES + 1_000_000
    assert book.stats()[PEER].received_bytes == 100


def test_control_messages_count_and_say_nothing_of_the_way() -> None:
    book = LinkBook()
    book.told(PEER, 10**7)
    book.heard(PEER, 5)
    one = book.stats()[PEER]
    assert (one.sent_bytes, one.received_bytes) == (10**7, 5)
    assert (one.carrier, one.up_bytes_per_s, one.down_bytes_per_s) == ("", 0.0, 0.0), "no stream was opened"
    assert book.choose(PEER, dialable=True, now=0.0) == TLS and book.stats()[PEER].carrier == TLS


def test_peers_are_bounded() -> None:
    book = LinkBook()
    for index in range(MAX_PEERS + 10):
        book.meter(index.to_bytes(32, "big"), TLS)
    assert len(book.stats()) == MAX_PEERS
