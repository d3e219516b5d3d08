"""What a full cluster changes in the machine's own network, and the way back."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hack.cluster import render
from hack.cluster import settings as defaults
from hack.cluster.shell import run

SYSCTLS = {"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1"}
_CHAIN_FAMILIES = ("iptables", "ip6tables")
_CHAIN_TABLES = ("nat", "filter", "mangle")
_OUR_CHAINS = re.compile(r"\b(KUBE|CNI)-")


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def sysctls() -> dict[str, str]:
    """Present values of the settings that `up` changes; one that the kernel lacks is left out."""
    return {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}


def nft_tables() -> list[str]:
    """Present nftables tables, each as "family name"."""
    lines = run(["nft", "list", "tables"]).splitlines()
    return sorted(line.removeprefix("table ").strip() for line in lines if line.startswith("table "))


def apply() -> None:
    """Node address, route of Services, forwarding and the guard. Doing it twice changes nothing."""
    # The guard goes first: nothing of the cluster may leave before it is in place.
    run(["nft", "-f", "-"], stdin=render.guard_rules())
    if not _has_node_address():
        run(["ip", "address", "add", f"{defaults.NODE_ADDRESS}/32", "dev", "lo"])
    # An address that no Service holds ends on the loopback device instead of taking the default route.
    run(["ip", "route", "replace", defaults.SERVICE_NETWORK, "dev", "lo", "src", defaults.NODE_ADDRESS])
    for name, value in SYSCTLS.items():
        if _sysctl(name).exists() and _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)


def _has_node_address() -> bool:
    return f" {defaults.NODE_ADDRESS}/32 " in run(["ip", "-4", "address", "show", "dev", "lo"])


def remove(baseline_sysctls: dict[str, str], baseline_tables: list[str]) -> None:
    """Undo `apply` and everything that kube-proxy, kubelet and the network plugins added."""
    run(["ip", "link", "delete", defaults.BRIDGE], check=False)
    run(["ip", "route", "delete", defaults.SERVICE_NETWORK, "dev", "lo"], check=False)
    run(["ip", "address", "delete", f"{defaults.NODE_ADDRESS}/32", "dev", "lo"], check=False)
    for family in ("ip", "ip6"):
        run(["nft", "delete", "table", family, "kube-proxy"], check=False)
    _remove_chains()
    _remove_new_empty_tables(baseline_tables)
    run(["nft", "delete", "table", "ip", defaults.GUARD_TABLE], check=False)
    for name, value in baseline_sysctls.items():
        if _sysctl(name).exists():
            _sysctl(name).write_text(value)


def _remove_chains() -> None:
    for family in _CHAIN_FAMILIES:
        for table in _CHAIN_TABLES:
            saved = run([f"{family}-save", "-t", table], check=False).splitlines()
            if any(_OUR_CHAINS.search(line) for line in saved):
                kept = [line for line in saved if not _OUR_CHAINS.search(line)]
                run([f"{family}-restore", "-T", table], stdin="\n".join(kept) + "\n")


def _remove_new_empty_tables(baseline: list[str]) -> None:
    """iptables makes its tables at first use; those that were not there before and hold no rule go again."""
    for family in ("ip", "ip6"):
        for table in _CHAIN_TABLES:
            name = f"{family} {table}"
            if name in baseline or name not in nft_tables():
                continue
            if not _has_rules(run(["nft", "list", "table", family, table])):
                run(["nft", "delete", "table", family, table])


def _has_rules(listing: str) -> bool:
    """Whether a table's listing holds anything beyond base chains that accept."""
    for line in listing.splitlines():
        text = line.strip()
        if not text or text.startswith(("#", "table ", "chain ")) or text == "}":
            continue
        if text.startswith("type ") and text.endswith("policy accept;"):
            continue
        return True
    return False


def refused_packets() -> int:
    """How many packets of pods the guard has kept from leaving the machine."""
    listing = json.loads(run(["nft", "--json", "list", "chain", "ip", defaults.GUARD_TABLE, "forwarded"]))
    expressions = [part for item in listing["nftables"] for part in item.get("rule", {}).get("expr", [])]
    return sum(int(part["counter"]["packets"]) for part in expressions if "counter" in part)


def leftovers() -> list[str]:
    """What is still there of a cluster's network."""
    found = []
    if defaults.BRIDGE in run(["ip", "-brief", "link", "show"]):
        found.append(f"bridge {defaults.BRIDGE}")
    if _has_node_address():
        found.append(f"address {defaults.NODE_ADDRESS} on lo")
    routes = run(["ip", "-4", "route", "show"])
    found += [
        f"route {network}"
        for network in (defaults.SERVICE_NETWORK, defaults.NODE_POD_NETWORK)
        if any(line.startswith(f"{network} ") for line in routes.splitlines())
    ]
    ours = {f"ip {defaults.GUARD_TABLE}", "ip kube-proxy", "ip6 kube-proxy"}
    found += [f"nftables table {name}" for name in nft_tables() if name in ours]
    for family in _CHAIN_FAMILIES:
        for table in _CHAIN_TABLES:
            # Listing by iptables would create the table; nftables lists only what is there.
            name = f"{'ip' if family == 'iptables' else 'ip6'} {table}"
            if name in nft_tables() and _OUR_CHAINS.search(run(["nft", "list", "table", *name.split()])):
                found.append(f"{family} chains in table {table}")
    return found


def changes_since(baseline_sysctls: dict[str, str], baseline_tables: list[str]) -> list[str]:
    """How the machine differs from what it was before `up`."""
    found = [f"nftables table {name} was not there before" for name in nft_tables() if name not in baseline_tables]
    now = sysctls()
    found += [
        f"sysctl {name} is {now.get(name)}, was {value}"
        for name, value in baseline_sysctls.items()
        if now.get(name) != value
    ]
    return found
