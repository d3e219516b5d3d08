"""``moontide.dev/v1alpha1``."""

from moontide.api.v1alpha1.common import (
    API_VERSION,
    GROUP,
    VERSION,
    AdminToken,
    Api,
    Condition,
    ConditionStatus,
    quantity_bytes,
)
from moontide.api.v1alpha1.inferencedeployment import (
    ClosedReplica,
    Endpoints,
    InferenceDeployment,
    InferenceDeploymentSpec,
    InferenceDeploymentStatus,
)
from moontide.api.v1alpha1.kvcachepool import KVCachePool, KVCachePoolSpec, KVCachePoolStatus
from moontide.api.v1alpha1.policyversion import (
    Member,
    PolicyVersion,
    PolicyVersionSpec,
    PolicyVersionStatus,
    Preparation,
    PreparedFleet,
    ReplicaCounts,
    ReplicaFailure,
    Update,
)

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "AdminToken",
    "Api",
    "ClosedReplica",
    "Condition",
    "ConditionStatus",
    "Endpoints",
    "InferenceDeployment",
    "InferenceDeploymentSpec",
    "InferenceDeploymentStatus",
    "KVCachePool",
    "KVCachePoolSpec",
    "KVCachePoolStatus",
    "Member",
    "PolicyVersion",
    "PolicyVersionSpec",
    "PolicyVersionStatus",
    "Preparation",
    "PreparedFleet",
    "ReplicaCounts",
    "ReplicaFailure",
    "Update",
    "quantity_bytes",
]
