"""The etcd behind a pool of three masters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moontide.api.v1alpha1.common import Api, rule, validations

Endpoint = Annotated[
    str,
    Field(
        max_length=260,
        json_schema_extra=validations(
            rule(
                "self.matches('^[a-z0-9]([-.a-z0-9]*[a-z0-9])?:[0-9]{1,5}$')",
                "the released Mooncake speaks plain HTTP to etcd; write each endpoint as HOST:PORT, for example "
                "etcd.infra.svc:2379",
            )
        ),
    ),
]


class Etcd(Api):
    """An etcd that others run."""

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, max_length=9)]
    """``HOST:PORT`` of each member; never the cluster's own etcd, which a log of keys would fill."""
