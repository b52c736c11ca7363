"""The key file, backups, and the two names of one key."""

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.node import identity as module
from farflung.node.identity import Identity
from farflung.protocol.errors import IdentityError


def test_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "config" / "identity.pem"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["identity.pem"]
    assert Identity.load_or_create(path).public_key == first.public_key
    module.verify(first.public_key, first.sign(b"message"), b"message")


def test_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    Identity.generate().save(path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Identity.generate().save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["identity.pem"]


def test_readable_by_others_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "Application Support" / "identity.pem"  # as on macOS
    Identity.generate().save(path)
    path.chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600") as caught:
        Identity.load_or_create(path)
    told = str(caught.value).partition("run: ")[2]
    assert shlex.split(told) == ["chmod", "600", str(path)]


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nMC4CAQ", b"nonsense", b"x" * 10_000])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"remove the file and restore your backup \(farflung id restore\)"):
        Identity.load_or_create(path)


def test_folder_instead_of_file(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        Identity.load(tmp_path)


@pytest.mark.parametrize("passphrase", [None, "correct horse"])
def test_backup(passphrase: str | None) -> None:
    identity = Identity.generate()
    text = identity.backup(passphrase)
    assert ("ENCRYPTED" in text) == (passphrase is not None)
    assert Identity.restore(f"\n{text}\n", passphrase).public_key == identity.public_key


def test_bad_backups() -> None:
    identity = Identity.generate()
    sealed = identity.backup("right")
    for passphrase in ("wrong", None):
        with pytest.raises(IdentityError, match="passphrase"):
            Identity.restore(sealed, passphrase)
    with pytest.raises(IdentityError, match="does not fit"):
        Identity.restore(identity.backup().replace(identity.libp2p_id, Identity.generate().libp2p_id))
    with pytest.raises(IdentityError, match="first line"):
        Identity.restore("hello")
    with pytest.raises(IdentityError, match="empty"):
        identity.backup("")


def test_known_libp2p_id() -> None:
    # Public key of the Ed25519 test vector in libp2p's peer-ids specification, and its encoding computed by go-libp2p.
    key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert module.libp2p_bytes(key).hex().startswith("0024080112201ed1e8fa")
    assert module.libp2p_text(key).startswith("12D3KooW")


@given(st.binary(min_size=32, max_size=32))
def test_names_convert_both_ways(key: bytes) -> None:
    assert module.from_libp2p_bytes(module.libp2p_bytes(key)) == key
    assert module.from_libp2p_text(module.libp2p_text(key)) == key


@given(st.text(max_size=80))
def test_wrong_names_are_value_errors(text: str) -> None:
    with pytest.raises(ValueError):
        module.from_libp2p_text(text)
