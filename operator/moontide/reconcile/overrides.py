"""Puts users' overrides over children, and says in the operator's own errors why one cannot be."""

from __future__ import annotations

from moontide.api.v1alpha1.podtemplate import PodTemplate
from moontide.errors import InvalidSpec
from moontide.resources import podtemplate
from moontide.resources.podtemplate import Overridden, Owned, Templated


def overridden(child: Templated, override: PodTemplate | None, owned: Owned) -> Templated | Overridden:
    """The child with the user's podTemplate over its pods. Raises :class:`InvalidSpec` for one that cannot be."""
    try:
        return podtemplate.over(child, override, owned)
    except ValueError as error:
        raise InvalidSpec("PodTemplateRefused", f"{error}") from error
