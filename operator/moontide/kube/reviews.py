"""What the API server says of others: whose a token is (TokenReview), and what they may (SubjectAccessReview)."""

from __future__ import annotations

from dataclasses import dataclass, field

from kubernetes.aio import client as k8s

from moontide.kube.errors import mapped

REVIEW_SECONDS = 5.0


@dataclass(frozen=True)
class User:
    """Somebody whom the API server knows."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Right:
    """One verb on one object; ``group`` is empty for the core API."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        return f'{self.verb} {resource} "{self.name}" in namespace "{self.namespace}"'


class Reviews:
    """Asks the API server. Both methods raise :class:`moontide.errors.Retry` where it does not answer."""

    def __init__(self, api: k8s.ApiClient) -> None:
        self._authentication = k8s.AuthenticationV1Api(api)
        self._authorization = k8s.AuthorizationV1Api(api)

    async def whose(self, token: str, audience: str) -> User | str:
        """Whose the token is; or why it is nobody's, in the API server's words."""
        body = k8s.V1TokenReview(spec=k8s.V1TokenReviewSpec(token=token, audiences=[audience]))
        with mapped("review a token"):
            answer = await self._authentication.create_token_review(body, _request_timeout=REVIEW_SECONDS)
        found = answer.status
        if found is None or not found.authenticated or found.user is None or not found.user.username:
            return str(found.error or "") if found is not None else ""
        if audience not in (found.audiences or ()):
            # Whoever checked it does not know audiences: it is one for the API server.
            return f"it is not for the audience {audience}"
        user = found.user
        return User(str(user.username), user.uid or "", tuple(user.groups or ()), dict(user.extra or {}))

    async def may(self, user: User, right: Right) -> bool:
        """Whether the user has the right."""
        attributes = k8s.V1ResourceAttributes(
            verb=right.verb, group=right.group, resource=right.resource, namespace=right.namespace, name=right.name
        )
        spec = k8s.V1SubjectAccessReviewSpec(
            user=user.name,
            uid=user.uid or None,
            groups=list(user.groups),
            extra=user.extra,
            resource_attributes=attributes,
        )
        with mapped("review a right"):
            answer = await self._authorization.create_subject_access_review(
                k8s.V1SubjectAccessReview(spec=spec), _request_timeout=REVIEW_SECONDS
            )
        return bool(answer.status and answer.status.allowed and not answer.status.denied)
