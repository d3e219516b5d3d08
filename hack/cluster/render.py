"""Configuration files and command lines of every component. Nothing here touches the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hack.cluster import settings as defaults
from hack.cluster.settings import Settings

Json = dict[str, Any]


def as_json(content: Json) -> str:
    """JSON is YAML as well: every component reads it, and so does the standard library."""
    return json.dumps(content, indent=1) + "\n"


def kubeconfig(server: str, context: str, user: str, authority: str, certificate: str, key: str) -> Json:
    """A kubeconfig with one context; the last three are base64 of PEM."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": context, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"client-certificate-data": certificate, "client-key-data": key}}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": user}}],
        "current-context": context,
    }


def etcd(settings: Settings, bin_dir: Path) -> list[str]:
    """Command line of etcd: loopback only; no fsync, as its data lives no longer than the cluster."""
    client = f"http://127.0.0.1:{settings.ports.etcd}"
    peer = f"http://127.0.0.1:{settings.ports.etcd_peer}"
    return [
        f"{bin_dir}/etcd",
        "--name=moontide",
        f"--data-dir={settings.run_dir}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=moontide={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(settings: Settings, bin_dir: Path) -> list[str]:
    """Command line of the API server."""
    pki = settings.pki_dir
    command = [
        f"{bin_dir}/kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{settings.ports.etcd}",
        f"--bind-address={settings.address}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.ports.apiserver}",
        f"--service-cluster-ip-range={defaults.SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--service-account-issuer=https://kubernetes.default.svc.{defaults.CLUSTER_DOMAIN}",
        f"--service-account-key-file={pki}/service-account.pub",
        f"--service-account-signing-key-file={pki}/service-account.key",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        "--profiling=false",
        *(_audit(settings) if settings.audit_policy else ()),
    ]
    if settings.control_plane_only:
        # No pod will ever look for the API server, and a loopback address is no valid endpoint.
        return [*command, "--endpoint-reconciler-type=none"]
    return [
        *command,
        "--endpoint-reconciler-type=lease",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
    ]


def _audit(settings: Settings) -> list[str]:
    # One file, however long.
    log = (f"--audit-log-path={settings.audit_log}", "--audit-log-maxsize=100000")
    return [f"--audit-policy-file={settings.audit_policy}", *log]


def controller_manager(settings: Settings, bin_dir: Path) -> list[str]:
    """Command line of the controller manager."""
    pki = settings.pki_dir
    own = f"{settings.run_dir}/controller-manager.kubeconfig"
    return [
        f"{bin_dir}/kube-controller-manager",
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--bind-address=127.0.0.1",
        f"--secure-port={settings.ports.controller_manager}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki}/service-account.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        f"--cluster-cidr={defaults.POD_NETWORK}",
        f"--service-cluster-ip-range={defaults.SERVICE_NETWORK}",
        "--allocate-node-cidrs=false",
        "--profiling=false",
    ]


def scheduler(settings: Settings, bin_dir: Path) -> list[str]:
    """Command line of the scheduler."""
    own = f"{settings.run_dir}/scheduler.kubeconfig"
    return [
        f"{bin_dir}/kube-scheduler",
        f"--kubeconfig={own}",
        f"--authentication-kubeconfig={own}",
        f"--authorization-kubeconfig={own}",
        "--bind-address=127.0.0.1",
        f"--secure-port={settings.ports.scheduler}",
        "--leader-elect=false",
        "--profiling=false",
    ]


def containerd_config(settings: Settings, pause_image: str) -> str:
    """containerd's configuration; the 2.x releases read this version of the format as well."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{settings.image_dir}"
state = "{settings.state_dir}/containerd"

[grpc]
  address = "{settings.containerd_socket}"

[{cri}]
  sandbox_image = "{pause_image}"
  # Lowering a score needs CAP_SYS_RESOURCE, which a machine may lack; without this every sandbox would fail there.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true

[{cri}.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{settings.run_dir}/cni/net.d"

[{cri}.containerd]
  snapshotter = "overlayfs"

[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
  SystemdCgroup = false

[plugins."io.containerd.internal.v1.opt"]
  path = "{settings.run_dir}/opt"
"""


def containerd(settings: Settings) -> list[str]:
    """Command line of containerd."""
    return ["/usr/bin/containerd", "--config", f"{settings.run_dir}/containerd.toml"]


def cni(settings: Settings) -> Json:
    """The pod network: one bridge, no masquerading, as pods have nobody to talk to outside."""
    return {
        "cniVersion": "0.4.0",
        "name": "moontide",
        "plugins": [
            {
                "type": "bridge",
                "bridge": defaults.BRIDGE,
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{settings.run_dir}/cni/addresses",
                    "ranges": [[{"subnet": defaults.NODE_POD_NETWORK}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet_config(settings: Settings) -> Json:
    """kubelet's configuration."""
    pki, run_dir = settings.pki_dir, settings.run_dir
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": defaults.NODE_ADDRESS,
        "port": 10250,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": 10248,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet-server.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet-server.key",
        "containerRuntimeEndpoint": f"unix://{settings.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDomain": defaults.CLUSTER_DOMAIN,
        "clusterDNS": [defaults.DNS_SERVICE_ADDRESS],
        "resolvConf": f"{run_dir}/resolv.conf",
        "volumePluginDir": f"{run_dir}/volume-plugins",
        "podLogsDir": f"{run_dir}/pod-logs",
        # The fill of the machine's disk is not the cluster's doing: do not evict pods or drop images for it.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "enableServer": True,
    }


def kubelet(settings: Settings, bin_dir: Path) -> list[str]:
    """Command line of kubelet."""
    return [
        f"{bin_dir}/kubelet",
        f"--config={settings.run_dir}/kubelet.json",
        f"--kubeconfig={settings.run_dir}/kubelet.kubeconfig",
        f"--root-dir={settings.run_dir}/kubelet",
        f"--cert-dir={settings.run_dir}/kubelet/pki",
        f"--hostname-override={defaults.NODE_NAME}",
        f"--node-ip={defaults.NODE_ADDRESS}",
        "--v=1",
    ]


def proxy_config(settings: Settings) -> Json:
    """kube-proxy's configuration; conntrack's limits stay as they are, since setting them may be refused."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{settings.run_dir}/proxy.kubeconfig"},
        "clusterCIDR": defaults.POD_NETWORK,
        "hostnameOverride": defaults.NODE_NAME,
        "bindAddress": defaults.NODE_ADDRESS,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": [f"{defaults.NODE_ADDRESS}/32"],
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def proxy(settings: Settings, bin_dir: Path) -> list[str]:
    """Command line of kube-proxy."""
    return [f"{bin_dir}/kube-proxy", f"--config={settings.run_dir}/proxy.json"]


def guard_rules() -> str:
    """An nftables script that keeps the cluster's traffic on this machine, both ways. It replaces its own table."""
    bridge, table = defaults.BRIDGE, defaults.GUARD_TABLE
    inside = f"{{ {defaults.NODE_ADDRESS}, {defaults.POD_NETWORK}, {defaults.SERVICE_NETWORK} }}"
    networks = f"{{ {defaults.POD_NETWORK}, {defaults.SERVICE_NETWORK} }}"
    return f"""table ip {table}
delete table ip {table}
table ip {table} {{
  chain incoming {{
    type filter hook prerouting priority raw; policy accept;
    iifname != {{ "lo", "{bridge}" }} ip daddr {inside} drop
  }}
  chain forwarded {{
    type filter hook forward priority -10; policy accept;
    iifname "{bridge}" oifname != "{bridge}" counter reject
    iifname != "{bridge}" oifname "{bridge}" drop
  }}
  chain outgoing {{
    type filter hook output priority 10; policy accept;
    ip daddr {networks} oifname != {{ "lo", "{bridge}" }} reject
  }}
}}
"""


COREFILE = f""".:53 {{
    errors
    health :8080
    ready :8181
    cache 5
    loadbalance
    kubernetes {defaults.CLUSTER_DOMAIN} in-addr.arpa {{
        pods insecure
        ttl 5
    }}
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""


def dns_objects(image: str) -> list[Json]:
    """CoreDNS as a Deployment behind the Service that kubelet names in every pod's resolv.conf."""
    labels = {"k8s-app": "kube-dns"}
    meta = {"name": "coredns", "namespace": "kube-system", "labels": labels}
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    container = {
        "name": "coredns",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"name": "dns", "containerPort": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "containerPort": 53, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1, "timeoutSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "periodSeconds": 10, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "20m", "memory": "40Mi"}, "limits": {"memory": "200Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"Corefile": COREFILE}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "serviceAccountName": "coredns",
                        "priorityClassName": "system-cluster-critical",
                        "dnsPolicy": "Default",
                        "containers": [container],
                        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
                    },
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**meta, "name": "kube-dns"},
            "spec": {
                "clusterIP": defaults.DNS_SERVICE_ADDRESS,
                "selector": labels,
                "ports": [
                    {"name": "dns", "port": 53, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                ],
            },
        },
    ]
