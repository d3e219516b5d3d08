"""The trainer's side: push weights into a fleet so that no KV of the old ones is served. Needs httpx, nothing else.

>>> with policy_update("policy", version=43, namespace="rl") as update:  # doctest: +SKIP
...     for fleet, address, token in update.engines:
...         push(address, token)
"""

from moontide.trainer.errors import (
    AccessError,
    ApiError,
    ApiUnavailable,
    BadName,
    BadVersion,
    CommitTimeout,
    MoontideError,
    PolicyNotFound,
    PreparationLost,
    PrepareFailed,
    PrepareTimeout,
    Superseded,
)
from moontide.trainer.steps import Engine
from moontide.trainer.update import Update, policy_update, policy_update_async

__all__ = [
    "AccessError",
    "ApiError",
    "ApiUnavailable",
    "BadName",
    "BadVersion",
    "CommitTimeout",
    "Engine",
    "MoontideError",
    "PolicyNotFound",
    "PreparationLost",
    "PrepareFailed",
    "PrepareTimeout",
    "Superseded",
    "Update",
    "policy_update",
    "policy_update_async",
]
