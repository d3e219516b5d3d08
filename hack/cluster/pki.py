"""Keys and certificates of one cluster, made with openssl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hack.cluster import settings as defaults
from hack.cluster.settings import Settings
from hack.cluster.shell import run

DAYS = 825
_REQUEST_CONFIG = "[req]\ndistinguished_name = subject\nprompt = no\n[subject]\n"


@dataclass(frozen=True)
class Certificate:
    """A leaf certificate: file name, subject, whose signature it bears, use and names."""

    name: str
    subject: str
    usage: str
    authority: str = "ca"
    alternative_names: str = ""


def certificates(settings: Settings) -> tuple[Certificate, ...]:
    """Every leaf certificate of a cluster."""
    service = f"kubernetes.default.svc.{defaults.CLUSTER_DOMAIN}"
    api_names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", service]
    api_addresses = sorted({settings.address, "127.0.0.1", defaults.API_SERVICE_ADDRESS})
    control_plane = (
        Certificate(
            "apiserver",
            "/CN=kube-apiserver",
            "serverAuth",
            alternative_names=",".join([f"DNS:{name}" for name in api_names] + [f"IP:{a}" for a in api_addresses]),
        ),
        Certificate("front-proxy", "/CN=front-proxy-client", "clientAuth", authority="front-proxy-ca"),
        Certificate("admin", "/O=system:masters/CN=moontide-admin", "clientAuth"),
        Certificate("controller-manager", "/CN=system:kube-controller-manager", "clientAuth"),
    )
    if settings.control_plane_only:
        return control_plane
    node = f"DNS:{defaults.NODE_NAME},IP:{defaults.NODE_ADDRESS},IP:127.0.0.1"
    return (
        *control_plane,
        Certificate("scheduler", "/CN=system:kube-scheduler", "clientAuth"),
        Certificate("proxy", "/CN=system:kube-proxy", "clientAuth"),
        Certificate("kubelet", f"/O=system:nodes/CN=system:node:{defaults.NODE_NAME}", "clientAuth"),
        Certificate("kubelet-server", f"/CN={defaults.NODE_NAME}", "serverAuth", alternative_names=node),
        Certificate("apiserver-kubelet", "/O=system:masters/CN=apiserver-kubelet-client", "clientAuth"),
    )


def create(settings: Settings) -> None:
    """Make the authorities, the leaf certificates and the key of service account tokens."""
    folder = settings.pki_dir
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    config = folder / "openssl.cnf"
    config.write_text(_REQUEST_CONFIG)
    for authority in ("ca", "front-proxy-ca"):
        extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
        _openssl_certificate(folder, authority, f"/CN=moontide-{authority}", extensions, None)
    for certificate in certificates(settings):
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={certificate.usage}",
        ]
        if certificate.alternative_names:
            extensions.append(f"subjectAltName={certificate.alternative_names}")
        _openssl_certificate(folder, certificate.name, certificate.subject, extensions, certificate.authority)
    run(["openssl", "genrsa", "-out", str(folder / "service-account.key"), "2048"])
    run(
        [
            "openssl",
            "rsa",
            "-in",
            str(folder / "service-account.key"),
            "-pubout",
            "-out",
            str(folder / "service-account.pub"),
        ]
    )
    (folder / "complete").touch()


def exists(settings: Settings) -> bool:
    """Whether `create` ran to its end."""
    return (settings.pki_dir / "complete").exists()


def _openssl_certificate(folder: Path, name: str, subject: str, extensions: list[str], authority: str | None) -> None:
    command = ["openssl", "req", "-x509", "-new", "-nodes", "-config", str(folder / "openssl.cnf"), "-sha256"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", str(DAYS), "-subj", subject]
    command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
    if authority is not None:
        command += ["-CA", str(folder / f"{authority}.crt"), "-CAkey", str(folder / f"{authority}.key")]
    for extension in extensions:
        command += ["-addext", extension]
    run(command)
    (folder / f"{name}.key").chmod(0o600)
