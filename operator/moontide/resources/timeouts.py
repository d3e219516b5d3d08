"""Environment that carries a pool's ``clientTimeouts`` to its clients. Pure."""

from __future__ import annotations

from moontide.api.v1alpha1.kvcachepool import ClientTimeouts


def rpc(timeouts: ClientTimeouts) -> dict[str, str]:
    """For every client of the master."""
    return {
        "MC_RPC_CONNECT_TIMEOUT_MS": str(timeouts.rpc_connect_milliseconds),
        "MC_RPC_TIMEOUT_MS": str(timeouts.rpc_milliseconds),
    }


def engine(timeouts: ClientTimeouts) -> dict[str, str]:
    """For an engine. What the engine has as its own default is left to it: naming it would change every template."""
    default = ClientTimeouts()
    values = {**rpc(timeouts), "MC_HANDSHAKE_CONNECT_TIMEOUT": str(timeouts.handshake_seconds)}
    if timeouts.transfer_seconds != default.transfer_seconds:
        seconds = str(timeouts.transfer_seconds)
        values |= {"MC_TCP_PROGRESS_TIMEOUT_SEC": seconds, "MC_TCP_STATUS_TIMEOUT_SEC": seconds}
    if timeouts.load_seconds != default.load_seconds:
        values["MOONTIDE_LOAD_TIMEOUT_SECONDS"] = str(timeouts.load_seconds)
    return values
