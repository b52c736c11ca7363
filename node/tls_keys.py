"""TLS contexts in which the identity key itself is the certificate's key, in both directions.

The standard library's `ssl` can ask a client for a certificate only together with a chain to verify it by, and offers no
hook to accept an unknown self-signed one. So every node issues its own certificate under one well-known authority whose
private key is public (derived below): the chain check then always passes and proves nothing, the handshake proves that
the other side holds the key in its certificate, and we compare that key with the one we expect. That comparison is the
only trust there is.
"""

import datetime
import hashlib
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from farflung.node.frames import TLS_ALPN
from farflung.node.identity import Identity

MAX_CERTIFICATE_BYTES = 4096

# Fixed dates: clocks of volunteers are wrong by years at times, and an identity does not expire.
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farflung: this authority proves nothing")])


def _authority_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"farflung tls authority, public").digest())


def _certificate(subject: x509.Name, key: Ed25519PublicKey, serial: int, authority: bool) -> x509.Certificate:
    issuer = _authority_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
        .sign(issuer, None)
    )


def make_context(identity: Identity, *, server: bool) -> ssl.SSLContext:
    """A TLS 1.3 context of this identity; both sides must show a certificate."""
    authority = _certificate(_AUTHORITY, _authority_key().public_key(), 1, True)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.libp2p_id)])
    serial = int.from_bytes(identity.public_key[:19], "big") + 2
    own = _certificate(name, identity.private_key.public_key(), serial, False)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([TLS_ALPN])
    if server:
        context.num_tickets = 0  # no resumption: each connection proves its key
    context.load_verify_locations(cadata=authority.public_bytes(serialization.Encoding.DER))
    # `ssl` reads key and certificate from files only.
    with tempfile.TemporaryDirectory(prefix="farflung-tls-") as folder:
        path = Path(folder) / "key.pem"
        path.touch(mode=0o600)
        path.write_bytes(
            identity.private_key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + own.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)
    return context


def peer_key(ssl_object: ssl.SSLObject) -> bytes | None:
    """The Ed25519 key that the other side proved to hold in a finished handshake; None when it is no such key."""
    if ssl_object.selected_alpn_protocol() != TLS_ALPN:
        return None
    encoded = ssl_object.getpeercert(binary_form=True)
    if encoded is None or len(encoded) > MAX_CERTIFICATE_BYTES:
        return None
    try:
        key = x509.load_der_x509_certificate(encoded).public_key()
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None
