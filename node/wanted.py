"""Which swarm a person means by `farflung join TEXT`, as far as this machine can tell without asking anybody."""

from collections.abc import Iterable
from dataclasses import dataclass

from farflung.node.network import PeerId
from farflung.node.paths import Paths, SwarmPaths
from farflung.node.peerbook import PeerBook
from farflung.node.swarmfiles import load_manifest, save_secret
from farflung.protocol.checks import nearest
from farflung.protocol.errors import ConfigError
from farflung.protocol.invitation import decode_invitation, is_invitation
from farflung.protocol.keys import fingerprint
from farflung.protocol.naming import split_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A swarm to join."""

    swarm: SwarmPaths | None
    """Its folder; None when only the DHT can tell what the name means."""
    addresses: tuple[str, ...]
    """Addresses of an invitation or of `--peer`."""
    elsewhere: tuple[str, ...] = ()
    """Addresses of peers of other swarms of this machine: any peer leads into the DHT."""
    near: str = ""
    """`; did you mean 'x'?`, of the swarms of this machine, for whoever looks a misspelt name up."""

    def book(self, swarm: SwarmPaths) -> PeerBook:
        """The known peers of the swarm, those of the invitation among them. Raises ConfigError."""
        book = PeerBook(swarm.peers)
        book.note_multiaddrs(self.addresses)
        return book

    def seeds(self, me: PeerId) -> list[str]:
        """Multiaddrs to join the DHT through. Raises ConfigError."""
        if self.swarm is None:
            return [*self.addresses, *self.elsewhere]
        return self.book(self.swarm).seeds(me)


def local_swarm(paths: Paths, text: str, peers: Iterable[str]) -> Wanted:
    """Find a name or the beginning of a manifest hash among this machine's swarms, or read an invitation.

    Raises ConfigError when the invitation is damaged or leads nowhere, or a name is ambiguous here.
    """
    addresses = tuple(peers)
    known = paths.swarms()
    said = text.strip().lower()
    name, at, _ = said.partition("@")
    fit = [s for s in known if s.name == name]
    if at:
        wanted = split_name(text)[1]
        fit = [s for s in fit if _founded_by(s, wanted)]
    elif not fit and len(said) >= 6:
        fit = [s for s in known if s.hash_hex.startswith(said)]
    if len(fit) > 1:
        listed = ", ".join(f"{s.name} ({s.hash_hex[:12]})" for s in fit)
        raise ConfigError(f"{text!r} means several swarms of this machine: {listed}; give the beginning of the hash")
    if fit:
        return Wanted(swarm=fit[0], addresses=addresses)
    if is_invitation(text):
        return _invited(paths, text, addresses)
    split_name(text)  # a look-up needs a name
    elsewhere = [seed for s in known for seed in PeerBook(s.peers).seeds(b"")]
    near = nearest(name, [s.name for s in known])
    if not addresses and not elsewhere:
        raise ConfigError(
            f"this machine knows no swarm {text!r} and no peer to ask{near or ':'} give `--peer ADDRESS` of a member, or join with an "
            "invitation"
        )
    return Wanted(swarm=None, addresses=addresses, elsewhere=tuple(elsewhere), near=near)


def _invited(paths: Paths, text: str, addresses: tuple[str, ...]) -> Wanted:
    invitation = decode_invitation(text)
    known = paths.swarm(invitation.swarm.hex())
    leads_nowhere = not addresses and not invitation.addresses and not PeerBook(known.peers).seeds(b"")
    if leads_nowhere and load_manifest(known) is None:
        raise ConfigError(
            "this invitation was made before any node ran, so it does not say where one is: ask for a fresh one, which "
            "`farflung invite` prints on a machine whose node runs, or give `--peer ADDRESS` of a member"
        )
    swarm = paths.add_swarm(invitation.swarm.hex(), invitation.name)
    if invitation.invite_seed:
        save_secret(swarm, invitation.invite_seed)
    wanted = Wanted(swarm=swarm, addresses=(*addresses, *invitation.addresses))
    wanted.book(swarm).save()
    return wanted


def _founded_by(swarm: SwarmPaths, prefix: str) -> bool:
    manifest = load_manifest(swarm)
    return manifest is not None and fingerprint(manifest.founder).startswith(prefix)
