"""How to reach an API server, by a pod's service account or a kubeconfig; or an operator's hook in its place."""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moontide.trainer.errors import AccessError
from moontide.trainer.steps import PATIENCE_SECONDS, Target

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOOK, HOOK_TOKEN_FILE, HOOK_CA_FILE = "MOONTIDE_HOOK", "MOONTIDE_HOOK_TOKEN_FILE", "MOONTIDE_HOOK_CA_FILE"
_TOKEN_ADVICE = (
    "use a token instead: kubectl config set-credentials moontide --token=$(kubectl create token SERVICEACCOUNT), "
    "and a context with that user"
)
ByProgram = Callable[[str, Mapping[str, Any]], str]
"""Gives the token that a kubeconfig's program gives, from where it is named (for people) and what is said of it."""


@dataclass(frozen=True)
class Access:
    """An API server, or a hook, and who we are to it. Its ``repr`` does not show the token."""

    server: str
    namespace: str
    """Where policies are that are named without a namespace; empty: nowhere."""
    origin: str
    """Where this comes from, for people."""
    tls: ssl.SSLContext | None = None
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    """Read for each request: the kubelet replaces tokens before they expire."""
    tls_name: str = ""
    proxy: str | None = None
    hook: bool = False
    in_cluster: bool = False
    """Whether this is a pod of the cluster, by its service account."""

    def target(self, name: str, namespace: str | None = None, say: Callable[[str], None] = lambda _: None) -> Target:
        """A policy there. Raises AccessError, BadName."""
        if not (namespace or self.namespace):
            raise AccessError(f"{self.origin} is of no namespace: give the policy's, as namespace=, or with -n")
        patience = PATIENCE_SECONDS if self.hook else 0.0
        return Target(namespace or self.namespace, name, say, hook=self.hook, patience=patience)

    def headers(self) -> dict[str, str]:
        """Who we are, for one request. Raises AccessError."""
        token = self.token
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except OSError as error:
                raise AccessError(f"{self.origin}: the token cannot be read: {error}") from error
        return {"authorization": f"Bearer {token}"} if token else {}


def find(
    kubeconfig: str | os.PathLike[str] | None = None,
    context: str | None = None,
    *,
    hook: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    service_account: Path = SERVICE_ACCOUNT,
    by_program: ByProgram | None = None,
) -> Access:
    """The first of: ``hook``, or ``kubeconfig``; the hook that $MOONTIDE_HOOK names; the files that $KUBECONFIG names;
    this pod's service account; ~/.kube/config.

    With a ``context`` only kubeconfigs count. ``by_program`` runs what a kubeconfig names under ``exec``. Raises
    AccessError.
    """
    environ = os.environ if environ is None else environ
    explicit = kubeconfig is not None or context is not None
    if hook is not None and explicit:
        raise AccessError("a hook and a kubeconfig (or its context) are two ways to one policy: give one of them")
    url = hook or ("" if explicit else environ.get(HOOK, "").strip())
    if url:
        files = token_file or environ.get(HOOK_TOKEN_FILE), ca_file or environ.get(HOOK_CA_FILE)
        return _hook(url, token, *files, service_account)
    if token or token_file or ca_file:
        raise AccessError(f"a token alone reaches nothing: give the hook's URL, too, as hook=, --hook or ${HOOK}")
    default = Path(environ.get("HOME") or Path.home()) / ".kube" / "config"
    if kubeconfig is not None:
        return _from_kubeconfig([Path(kubeconfig)], context, by_program)
    if environ.get("KUBECONFIG"):
        paths = [Path(each) for each in environ["KUBECONFIG"].split(os.pathsep) if each]
        return _from_kubeconfig(paths, context, by_program)
    if context is None and environ.get("KUBERNETES_SERVICE_HOST") and (service_account / "token").exists():
        return _in_cluster(environ, service_account)
    if default.exists():
        return _from_kubeconfig([default], context, by_program)
    raise AccessError(
        f"no cluster is known: this is no pod with a service account, $KUBECONFIG is empty and {default} does not "
        "exist; set KUBECONFIG, or give a kubeconfig"
    )


def _hook(
    url: str,
    token: str | None,
    token_file: str | os.PathLike[str] | None,
    ca_file: str | os.PathLike[str] | None,
    service_account: Path,
) -> Access:
    where = f"the hook {url}"
    if not url.startswith(("https://", "http://")):
        raise AccessError(f"{where} is no URL; write https://host:port")
    if not (token or token_file):
        raise AccessError(
            f"{where} wants a token: give token= or token_file=, --hook-token-file or ${HOOK_TOKEN_FILE}; one is made "
            "with: kubectl create token SERVICEACCOUNT -n NAMESPACE --audience moontide"
        )
    try:
        authority = Path(ca_file).read_bytes() if ca_file else None
    except OSError as error:
        raise AccessError(f"{where}: the file of its authority cannot be read: {error}") from error
    namespace = service_account / "namespace"
    return Access(
        server=url.rstrip("/"),
        namespace=namespace.read_text().strip() if namespace.exists() else "",
        origin=where,
        tls=_tls(where, authority) if url.startswith("https://") else None,
        token=(token or "").strip(),
        token_file=Path(token_file) if token_file and not token else None,
        hook=True,
    )


def _in_cluster(environ: Mapping[str, str], folder: Path) -> Access:
    host = environ["KUBERNETES_SERVICE_HOST"]
    host = f"[{host}]" if ":" in host else host
    namespace = folder / "namespace"
    return Access(
        server=f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT', '443')}",
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        origin=f"the service account of this pod ({folder})",
        tls=_tls(str(folder), (folder / "ca.crt").read_bytes() if (folder / "ca.crt").exists() else None),
        token_file=folder / "token",
        in_cluster=True,
    )


def _from_kubeconfig(paths: list[Path], context: str | None, by_program: ByProgram | None) -> Access:
    config = _merged(paths)
    shown = os.pathsep.join(str(path) for path in paths)
    chosen = context or str(config["current-context"])
    if not chosen:
        known = ", ".join(sorted(config["contexts"])) or "none"
        raise AccessError(f"kubeconfig {shown} has no current context; name one of: {known}")
    where = f"kubeconfig {shown}, context {chosen}"
    if chosen not in config["contexts"]:
        known = ", ".join(sorted(config["contexts"])) or "none"
        raise AccessError(f"kubeconfig {shown} has no context {chosen!r}; name one of: {known}")
    entry = config["contexts"][chosen]
    cluster, user = config["clusters"].get(entry.get("cluster")), config["users"].get(entry.get("user"), {})
    if not cluster or not cluster.get("server"):
        raise AccessError(f"{where}: cluster {entry.get('cluster')!r} has no server; write clusters[].cluster.server")
    for key in ("exec", "auth-provider", "username", "as"):
        if key == "exec" and by_program is not None:
            continue
        if user.get(key):
            program = f" ({user[key].get('command')})" if key == "exec" and isinstance(user[key], dict) else ""
            raise AccessError(f"{where}: credentials by `{key}`{program} are not supported; {_TOKEN_ADVICE}")
    token_file = _path(user, "tokenFile")
    token = str(user.get("token") or "").strip()
    if by_program is not None and isinstance(user.get("exec"), dict):
        token, token_file = by_program(where, {**user["exec"], "/folder": user["/folder"]}), None
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        namespace=str(entry.get("namespace") or "default"),
        origin=where,
        tls=_tls(
            where,
            _bytes(where, cluster, "certificate-authority"),
            _bytes(where, user, "client-certificate"),
            _bytes(where, user, "client-key"),
            insecure=bool(cluster.get("insecure-skip-tls-verify")),
        ),
        token=token,
        token_file=token_file,
        tls_name=str(cluster.get("tls-server-name") or ""),
        proxy=str(cluster["proxy-url"]) if cluster.get("proxy-url") else None,
    )


def _merged(paths: list[Path]) -> dict[str, Any]:
    """One kubeconfig out of several, as kubectl does it: the first that names something wins; missing files do not
    count where there is more than one."""
    merged: dict[str, Any] = {"contexts": {}, "clusters": {}, "users": {}, "current-context": ""}
    for path in paths:
        if len(paths) > 1 and not path.exists():
            continue
        loaded = _load(path)
        merged["current-context"] = merged["current-context"] or loaded.get("current-context") or ""
        for kind, inner in _SECTIONS.items():
            for each in loaded.get(kind) or ():
                found = {**(each.get(inner) or {}), "/folder": path.parent}
                merged[kind].setdefault(each.get("name"), found)
    return merged


_SECTIONS = {"contexts": "context", "clusters": "cluster", "users": "user"}


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise AccessError(f"kubeconfig {path} cannot be read: {error.strerror}; give another") from error
    except UnicodeDecodeError as error:
        raise _no_kubeconfig(path, "not text") from error
    try:
        loaded = json.loads(text)
    except ValueError:
        loaded = _yaml(path, text)
    if not isinstance(loaded, dict):
        raise _no_kubeconfig(path, "no mapping")
    for kind, inner in _SECTIONS.items():
        listed = loaded.get(kind) or []
        named = isinstance(listed, list) and all(isinstance(each, dict) for each in listed)
        if not named or not all(isinstance(each.get(inner) or {}, dict) for each in listed):
            raise _no_kubeconfig(path, f"{kind} is no list of {{name, {inner}}}")
    return loaded


def _no_kubeconfig(path: Path, why: str) -> AccessError:
    return AccessError(
        f"{path} is no kubeconfig ({why}); write --kubeconfig FILE with one, as $HOME/.kube/config: "
        "`kubectl config view` shows the one in use"
    )


def _yaml(path: Path, text: str) -> Any:
    """Kubeconfigs are YAML, and in a pod nobody needs it: so the parser is looked for here only."""
    try:
        import yaml
    except ImportError as error:
        raise AccessError(
            f"kubeconfig {path} is YAML, and PyYAML is not installed: pip install pyyaml, or write it as JSON: "
            "kubectl config view --raw --flatten -o json"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _no_kubeconfig(path, " ".join(str(error).split())) from error


def _path(section: Mapping[str, Any], key: str) -> Path | None:
    """A file that a section names, relative to the kubeconfig's folder."""
    return Path(section["/folder"]) / str(section[key]) if section.get(key) else None


def _bytes(where: str, section: Mapping[str, Any], key: str) -> bytes | None:
    """A certificate or key: inline as ``key-data``, which wins, or in the file ``key``."""
    data, path = section.get(f"{key}-data"), _path(section, key)
    try:
        if data:
            return base64.b64decode(str(data), validate=True)
        return path.read_bytes() if path is not None else None
    except (binascii.Error, OSError) as error:
        raise AccessError(f"{where}: {key} cannot be read: {error}") from error


def _tls(
    where: str, authority: bytes | None, cert: bytes | None = None, key: bytes | None = None, *, insecure: bool = False
) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        # Authorities that Kubernetes installers make often lack what Python 3.13 asks for in strict mode.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert and key:
            # OpenSSL reads a client's certificate from files only.
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "client.pem"
                path.touch(mode=0o600)
                path.write_bytes(cert + b"\n" + key)
                context.load_cert_chain(path)
    except (ssl.SSLError, UnicodeDecodeError, OSError) as error:
        raise AccessError(f"{where}: a certificate or key cannot be used: {error}; is it PEM?") from error
    return context
