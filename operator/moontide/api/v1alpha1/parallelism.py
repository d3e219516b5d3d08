"""How one engine spans GPUs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from moontide.api.v1alpha1.arguments import sizes_rule
from moontide.api.v1alpha1.common import Api, rule, validations

_GPU = "nvidia.com/gpu"
_A_POD = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data / self.parallelism.nodes"


class Parallelism(Api):
    """How many GPUs one replica computes on: ``tensor`` x ``pipeline`` x ``data``, on ``nodes`` pods."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "self.tensor * self.pipeline % self.nodes == 0",
                "parallelism.nodes does not divide tensor x pipeline, so that its pods would not be equal; write for "
                "example tensor: 8, pipeline: 2, nodes: 2",
            ),
            rule(
                "self.nodes == 1 || self.data == 1",
                "parallelism.data is of one pod; write data: 1, and more spec.replicas, each of which is a group of "
                "nodes",
            ),
        )
    )

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share each layer."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Groups of layers, each on its own GPUs."""
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of the model behind one HTTP port. For a model without experts more ``replicas`` do the same, each with
    its own pod."""

    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods that one replica spans. More than one needs LeaderWorkerSet in the cluster."""

    @property
    def pod_gpus(self) -> int:
        """GPUs of one pod."""
        return self.tensor * self.pipeline * self.data // self.nodes

    def arguments(self) -> list[str]:
        """The engine's arguments."""
        made = ["--tensor-parallel-size", str(self.tensor)]
        if self.pipeline > 1:
            made += ["--pipeline-parallel-size", str(self.pipeline)]
        if self.data > 1:
            made += ["--data-parallel-size", str(self.data)]
        return made


def _nodes(spec: str) -> str:
    return f"(has({spec}.parallelism) ? {spec}.parallelism.nodes : 1)"


def rules() -> tuple[dict[str, Any], ...]:
    """Of the spec."""
    limits = f"has(self.parallelism) && has(self.resources) && '{_GPU}' in self.resources.limits"
    return (
        sizes_rule(),
        rule(
            f"!({limits}) || string(self.resources.limits['{_GPU}']) == string({_A_POD})",
            f"resources.limits[{_GPU}] is not tensor x pipeline x data / nodes of spec.parallelism, the GPUs that one "
            "pod computes on; write that number, or remove spec.resources, as it is the default",
        ),
        rule(
            f"{_nodes('self')} == {_nodes('oldSelf')}",
            "parallelism.nodes cannot be changed, as the fleet's pods are of another kind then: write another "
            "InferenceDeployment",
        ),
    )
