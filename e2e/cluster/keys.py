"""The keys of one cluster: an authority made at its start, the certificates it signs, kubeconfigs that carry them."""

import base64
import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key as files."""

    certificate: Path
    key: Path


class Authority:
    """The authority that signs certificates for one cluster; later processes read its pair from `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self.pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
        if not self.pair.certificate.exists():
            self._found(name)
        self._key = _read_key(self.pair.key)
        self._certificate = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())

    def client(self, user: str, groups: tuple[str, ...] = ()) -> Pair:
        """Return a certificate that identifies `user` and its groups to the API server."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return self._issue(user, groups, usage, None)

    def server(self, user: str, names: list[str], groups: tuple[str, ...] = ()) -> Pair:
        """Return a certificate for a server with these `names` (DNS names and addresses)."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        return self._issue(user, groups, usage, x509.SubjectAlternativeName([_general_name(name) for name in names]))

    def kubeconfig(self, user: str, url: str, groups: tuple[str, ...] = ()) -> Path:
        """Write a kubeconfig file (mode 0600) with a new client certificate of `user`."""
        pair = self.client(user, groups)
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "cluster",
                    "cluster": {"server": url, "certificate-authority-data": _base64(self.pair.certificate)},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _base64(pair.certificate),
                        "client-key-data": _base64(pair.key),
                    },
                }
            ],
            "contexts": [{"name": user, "context": {"cluster": "cluster", "user": user}}],
            "current-context": user,
        }
        path = self.folder / f"{_file_name(user)}.kubeconfig"
        _write_private(path, yaml.safe_dump(document).encode())
        return path

    def _found(self, name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"stoker-test-{name}")])
        builder = _builder(subject, subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        _write_key(self.pair.key, key)
        self.pair.certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _issue(
        self,
        user: str,
        groups: tuple[str, ...],
        usage: x509.ExtendedKeyUsage,
        names: x509.SubjectAlternativeName | None,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        builder = _builder(subject, self._certificate.subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(usage, critical=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        stem = f"{_file_name(user)}-{'server' if names else 'client'}"
        pair = Pair(self.folder / f"{stem}.crt", self.folder / f"{stem}.key")
        _write_key(pair.key, key)
        pair.certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return pair


def service_account_keys(folder: Path) -> Pair:
    """Return the pair that signs service account tokens: private `key`, public half in `certificate`."""
    pair = Pair(folder / "service-accounts.pub", folder / "service-accounts.key")
    if not pair.key.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(pair.key, key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        pair.certificate.write_bytes(public)
    return pair


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(now + LIFETIME)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _file_name(user: str) -> str:
    return user.replace(":", "-")


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_private(path, encoded)


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
