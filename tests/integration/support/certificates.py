"""A certificate authority for a test."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates, which lie in a folder as files.

    Args:
        folder: where; its own certificate is `ca`.
        name: of the authority.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, _name(name)
        folder.mkdir(parents=True)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.ca = self._write("ca.pem", self._sign(self.key, self.name, is_ca=True))

    def issue(self, name: str, address: str = "") -> tuple[Path, Path]:
        """Make a certificate, maybe of a host by its address, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = self._sign(key, _name(name), address=address)
        return self._write(f"{name}.pem", signed), self._write(f"{name}.key", _private(key))

    def sign(self, request: x509.CertificateSigningRequest) -> bytes:
        """Make a certificate for a key that somebody else has."""
        return self._sign(request, request.subject)

    def _sign(
        self,
        key: ec.EllipticCurvePrivateKey | x509.CertificateSigningRequest,
        subject: x509.Name,
        is_ca: bool = False,
        address: str = "",
    ) -> bytes:
        now = datetime.datetime.now(tz=datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if address:
            names = [x509.IPAddress(ipaddress.ip_address(address))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return path


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
