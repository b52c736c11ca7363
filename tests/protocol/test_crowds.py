"""A newcomer in a crowd of newcomers listens to some of them; a member to all, for it may let them in."""

from tests.protocol.alone import HEAD, IDS, INSIDE, PAST, RULES, sends
from tests.protocol.bus import beat, certify, new_member, signers, state_digest

from farflung.protocol import messages
from farflung.protocol.chain import successor
from farflung.protocol.keys import Signer
from farflung.protocol.member import Member
from farflung.protocol.membership import ENOUGH_NEWCOMERS, FORGET_AFTER_S
from farflung.protocol.messages import Heartbeat

ME, *CROWD = (one for one in signers(len(IDS) + ENOUGH_NEWCOMERS + 4) if one.peer_id not in IDS)
KEYS = [one.peer_id for one in CROWD]
FELLOWS, TOO_MANY = KEYS[:ENOUGH_NEWCOMERS], KEYS[ENOUGH_NEWCOMERS:]

STATELESS = beat(height=0, version=0, digest=b"", state="joining")
STATEFUL = beat(height=HEAD.height, version=HEAD.version, digest=state_digest(HEAD.version))


def hears_all(who: Signer = ME) -> Member:
    """One that has heard as many newcomers as it listens to."""
    made = new_member(who, RULES)
    for peer in FELLOWS:
        made.receive(peer, STATELESS, 0.0)
    return made


def test_more_newcomers_than_one_listens_to_are_not_greeted() -> None:
    one = hears_all()
    assert one.receive(TOO_MANY[0], STATELESS, 1.0) == [] == one.found(dict.fromkeys(TOO_MANY), 1.0)
    assert set(one.membership.peers) == set(FELLOWS)
    assert {s.to for s in sends(one.tick(100.0), Heartbeat)} == set(FELLOWS)


def test_who_has_the_state_is_listened_to_however_many_newcomers_there_are() -> None:
    one = hears_all()
    assert {s.to for s in sends(one.found({IDS[0]: b"", TOO_MANY[0]: None}, 1.0), Heartbeat)} == {IDS[0]}
    for peer in (IDS[0], TOO_MANY[1]):  # who has it need not be a member, as far as a newcomer can tell
        assert {s.to for s in sends(one.receive(peer, STATEFUL, 2.0), Heartbeat)} == {peer}, "an answer"
    assert set(one.membership.peers) == {*FELLOWS, IDS[0], TOO_MANY[1]}


def test_a_member_without_a_state_is_no_newcomer() -> None:
    one = hears_all()
    one.begin(None, PAST, 1.0)
    one.membership.forget(IDS[1])
    one.receive(IDS[1], STATELESS, 2.0)
    assert one.membership.heartbeat(IDS[1]) == STATELESS
    one.membership.forget(IDS[2])
    assert {s.to for s in sends(one.found({IDS[2]: None}, 2.0), Heartbeat)} == {IDS[2]}


def test_a_member_listens_to_all_who_would_come_in() -> None:
    one = hears_all(INSIDE[0])
    one.begin(None, PAST, 1.0)
    for peer in KEYS:
        one.receive(peer, STATELESS, 2.0)
    assert set(KEYS) <= set(one.membership.peers)


def test_who_becomes_a_member_is_heard_from_then_on() -> None:
    one = hears_all()
    one.begin(None, PAST, 1.0)
    after = successor(RULES.swarm, HEAD, RULES.rules, view=(*HEAD.view, TOO_MANY[0]), left=(), result=None)
    one.receive(IDS[0], messages.Committed(certify(after, INSIDE)), 2.0)
    assert one.head.commit == after and TOO_MANY[0] in one.membership.peers


def test_others_take_the_place_of_newcomers_that_are_gone_or_have_the_state_now() -> None:
    one = hears_all()
    one.receive(FELLOWS[0], STATEFUL, 1.0)
    one.receive(TOO_MANY[0], STATELESS, 2.0)
    assert TOO_MANY[0] in one.membership.peers
    for at in range(3, int(FORGET_AFTER_S), 2):
        one.tick(float(at))
    one.receive(TOO_MANY[1], STATELESS, FORGET_AFTER_S)
    assert TOO_MANY[1] in one.membership.peers, "all others are silent"


def test_whoever_is_found_at_once_hears_one_heartbeat() -> None:
    """One signature for all of them."""
    one = new_member(ME, RULES)
    greetings = sends(one.found(dict.fromkeys(FELLOWS), 0.0), Heartbeat)
    assert {s.to for s in greetings} == set(FELLOWS) and len({id(s.message) for s in greetings}) == 1
    assert one.found(dict.fromkeys(FELLOWS), 1.0) == [], "they are known by now"


def test_records_of_a_crowd_bring_no_more_than_one_has_time_for() -> None:
    """Nobody of them was heard yet, and they may never answer."""
    one = new_member(ME, RULES)
    records: dict[bytes, bytes | None] = {**dict.fromkeys(KEYS), IDS[0]: b""}
    assert len(sends(one.found(records, 0.0), Heartbeat)) == ENOUGH_NEWCOMERS + 1
    assert IDS[0] in one.membership.peers and one.found(records, 1.0) == []


def test_members_that_were_not_heard_yet_take_no_newcomers_place() -> None:
    one = new_member(ME, RULES)
    one.begin(None, PAST, 0.0)
    assert {s.to for s in sends(one.found(dict.fromkeys(KEYS), 1.0), Heartbeat)} == set(FELLOWS)


def test_whoever_has_lost_its_state_is_of_no_group_however_many_newcomers_there_are() -> None:
    one = hears_all()
    one.neighbours.note(TOO_MANY[0], b"another", shown=True)
    assert one.receive(TOO_MANY[0], STATELESS, 1.0) == [] and not one.neighbours.groups
