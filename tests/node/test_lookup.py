"""What a newcomer looks up may not be there yet: over the modelled network and its clock."""

import asyncio

import pytest
from tests.node.test_discovery import LATER, SIGNERS, founded, in_network, of_a_later_version

from farflung.node import lookup
from farflung.node.discovery import publish_founding
from farflung.node.lookup import look_up_manifest, look_up_name
from farflung.node.network import Network
from farflung.protocol.errors import ConfigError, NameContested, NetworkError
from farflung.protocol.naming import full_name
from farflung.protocol.records import place_manifest

MEANT, OTHER = SIGNERS[0].peer_id, SIGNERS[1].peer_id


async def publish(network: Network, number: int, *, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    await publish_founding(network, SIGNERS[number], "alpha", founded(SIGNERS[number])[1])


def test_a_claim_that_is_on_its_way_is_waited_for_also_beside_somebody_elses() -> None:
    """Somebody else's alone was taken as the answer: that the one who is meant claims nothing."""

    async def body(networks: list[Network]) -> None:
        await publish(networks[1], 1)
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(look_up_name(networks[2], full_name("alpha", MEANT)))
            group.create_task(publish(networks[0], 0, after_s=lookup.LOOK_UP_S / 2))
        assert looking.result().founder == MEANT

    in_network(body)


def test_what_nobody_claims_in_time_is_said_with_who_else_claims_it() -> None:
    async def body(networks: list[Network]) -> None:
        loop = asyncio.get_running_loop()
        for claimed in (False, True):
            began = loop.time()
            with pytest.raises(ConfigError) as caught:
                await look_up_name(networks[2], full_name("alpha", MEANT))
            assert lookup.LOOK_UP_S <= loop.time() - began <= lookup.LOOK_UP_S + 2 * lookup.RETRY_S
            assert f"no claim to '{full_name('alpha', MEANT)}' found" in str(caught.value)
            assert (f"others claim {full_name('alpha', OTHER)}" in str(caught.value)) == claimed
            await publish(networks[1], 1)
        said: list[str] = []
        with pytest.raises(NetworkError, match="no peer of swarm alpha could be reached"):
            await look_up_manifest(networks[2], bytes(32), "alpha", said.append)
        assert len(said) == 8 and said[0] == "no answer yet, asking for up to 80 s more ..."

    in_network(body)


def test_a_bare_name_that_somebody_claims_is_contested_at_once() -> None:
    async def body(networks: list[Network]) -> None:
        await publish(networks[1], 1)
        began = asyncio.get_running_loop().time()
        with pytest.raises(NameContested, match=f"farflung join {full_name('alpha', OTHER)}"):
            await look_up_name(networks[2], "alpha")
        assert asyncio.get_running_loop().time() - began < lookup.RETRY_S

    in_network(body)


def test_a_manifest_of_another_version_is_told_of_at_once_and_by_whom_it_is() -> None:
    """It was looked for till the time was over, and then nobody was said to be there."""
    signed = of_a_later_version(SIGNERS[0])

    async def body(networks: list[Network]) -> None:
        placed = place_manifest(signed, now=networks[1].unix_time())
        assert await networks[1].put_record(placed.key, placed.subkey, placed.value, placed.expires_at)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConfigError) as caught:
            await look_up_manifest(networks[2], signed.swarm, "alpha")
        assert asyncio.get_running_loop().time() - began < lookup.RETRY_S
        assert f"'alpha' of founder {MEANT.hex()[:12]}: speaks protocol versions [{LATER}]" in str(caught.value)
        assert "Update farflung, or ask the founder" in str(caught.value)

    in_network(body)


def test_a_network_that_does_not_answer_is_asked_again_and_then_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(networks: list[Network]) -> None:
        asked = 0

        async def silence(key: str) -> dict[str, bytes]:
            nonlocal asked
            asked += 1
            raise NetworkError("no answer")

        monkeypatch.setattr(networks[2], "get_records", silence)
        with pytest.raises(ConfigError, match="nobody answers for the name 'alpha'"):
            await look_up_name(networks[2], "alpha")
        assert asked > 10

    in_network(body)


def test_by_a_wrong_clock_nothing_is_found_and_that_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers were reached, and the person was told that nobody could be."""

    async def body(networks: list[Network]) -> None:
        trouble = "this machine's clock is 67 min ahead of those of 3 peers: set it"
        monkeypatch.setattr(networks[2], "clock_trouble", lambda: trouble)
        with pytest.raises(NetworkError) as nobody:
            await look_up_manifest(networks[2], bytes(32), "alpha")
        with pytest.raises(ConfigError) as unclaimed:
            await look_up_name(networks[2], "alpha")
        for said, otherwise in ((str(nobody.value), "no peer of swarm alpha"), (str(unclaimed.value), "alpha")):
            assert said.startswith(f"{trouble}, and join again") and otherwise in said.partition("If it is right, ")[2]

    in_network(body)
