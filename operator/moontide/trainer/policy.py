"""What a trainer reads from a PolicyVersion. Pure; knows the wire format and nothing of the operator's models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moontide.trainer.errors import BadName, BadVersion

Object = dict[str, Any]

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_LONGEST_LABEL = 128
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


def label_of(version: int | str) -> str:
    """The version as engines and status carry it; 43 and "43" are the same. Raises BadVersion."""
    text = str(version)
    if isinstance(version, bool) or not isinstance(version, int | str) or len(text) > _LONGEST_LABEL:
        raise BadVersion(f"{version!r} is no version: write a whole number or a short text, for example 43 or step-43")
    if not _LABEL.fullmatch(text):
        raise BadVersion(
            f"{text!r} is no version: write a whole number from 0, or letters, digits, '.', '_', ':' and '-' that "
            "begin with a letter or digit, for example 43 or step-43"
        )
    return text


def checked_name(text: str, of: str) -> str:
    """``text``, which goes into URLs. Raises BadName."""
    if not isinstance(text, str) or not _NAME.fullmatch(text) or len(text) > 253:
        raise BadName(f"{text!r} is no name of a {of}: write it alone, in small letters, for example my-{of}")
    return text


@dataclass(frozen=True)
class Condition:
    """One condition; ``fresh``: it speaks of the object's present spec."""

    status: str
    reason: str
    message: str
    fresh: bool


class Policy:
    """A PolicyVersion as the API server gave it."""

    def __init__(self, body: Object) -> None:
        self.body = body
        self.spec: Object = body.get("spec") or {}
        self.status: Object = body.get("status") or {}
        metadata: Object = body.get("metadata") or {}
        self.namespace = str(metadata.get("namespace", ""))
        self.name = str(metadata.get("name", ""))
        self.generation = int(metadata.get("generation", 0))
        self.resource_version = str(metadata.get("resourceVersion", ""))

    @property
    def version(self) -> str | None:
        """What is asked for."""
        return _text(self.spec.get("version"))

    @property
    def preparing(self) -> str | None:
        """What a trainer is about to push; the version itself does not count."""
        found = _text(self.spec.get("preparing"))
        return None if found == self.version else found

    @property
    def served(self) -> str | None:
        """The version of the last change that finished."""
        return _text(self.status.get("version"))

    @property
    def preparation(self) -> Object:
        """``status.preparation``; empty where there is none."""
        return self.status.get("preparation") or {}

    def condition(self, kind: str) -> Condition:
        """One condition; Unknown, and not fresh, where it is not there."""
        for each in self.status.get("conditions") or ():
            if each.get("type") == kind:
                fresh = each.get("observedGeneration") == self.generation
                return Condition(str(each["status"]), str(each["reason"]), str(each.get("message", "")), fresh)
        return Condition("Unknown", "Unknown", "the operator has not looked at it yet", False)

    def holds(self, kind: str) -> bool:
        """Whether a condition is True of the present spec."""
        found = self.condition(kind)
        return found.status == "True" and found.fresh

    def is_preparation_of(self, label: str) -> bool:
        """Whether ``status.preparation`` is of this version, over or not."""
        return bool(self.preparation) and _text(self.preparation.get("version")) == label

    def is_over(self, label: str) -> bool:
        """The operator remembers that a preparation of this version was committed or expired; it begins none anew
        before it has seen ``spec.preparing`` without it."""
        return self.is_preparation_of(label) and bool(self.preparation.get("outcome"))

    def is_prepared(self, label: str) -> bool:
        """Whether the weights of this version may be pushed, by the word of an operator that saw the present spec."""
        found = self.preparation
        ready = bool(found.get("preparedAt")) and not found.get("outcome")
        return self.is_preparation_of(label) and ready and self.preparing == label and self.holds("Prepared")

    def is_current(self, label: str) -> bool:
        """Whether the version is served and nothing else is: Current=True of the present spec, and at least one
        replica serves, unless there is none at all."""
        counts = self.status.get("replicas") or {}
        serving = int(counts.get("current", 0)) > 0 or int(counts.get("total", 0)) == 0
        return self.version == self.served == label and serving and self.holds("Current")

    def why_lost(self, label: str, epoch: int) -> tuple[str, str] | None:
        """Reason and words if the preparation of this version in this epoch is over; None while it holds."""
        if self.is_over(label) and self.preparation["outcome"] == "Expired":
            return "Expired", f"it was not committed within {self.spec.get('prepareDeadlineSeconds')} s"
        if self.preparing != label:
            return "Aborted", f"spec.preparing is {self.preparing or 'empty'} now"
        if not self.is_preparation_of(label) or self.preparation.get("outcome"):
            return "Aborted", "the operator ended it"
        if self.preparation.get("epoch") != epoch:
            return "BegunAnew", f"it began anew, in epoch {self.preparation.get('epoch')} instead of {epoch}"
        return None

    def state(self) -> str:
        """One line on how far a change is, without numbers that count."""
        found = self.condition("Current")
        counts = (self.status.get("replicas") or {}).get("summary", "0/0")
        text = f"Current={found.status} ({found.reason}) {counts} replicas"
        prepared = self.condition("Prepared")
        if self.preparation and prepared.status != "Unknown":
            text += f", Prepared={prepared.status} ({prepared.reason})"
        if not found.fresh:
            return f"{text}, of an older spec"
        return f"{text}: {found.message}" if found.message else text

    def advice(self) -> str:
        """What holds the change up, and what to look at. One sentence or more."""
        found = self.condition("Current")
        if not found.fresh:
            return (
                f"the operator has not looked at generation {self.generation} of the policy yet; is it running? "
                "Look with: kubectl get pods -n moontide-system"
            )
        degraded = self.condition("Degraded")
        said = f"{found.status}, {found.message or found.reason}"
        if degraded.status == "True":
            said += f"; {degraded.reason}: {degraded.message}"
        if "WaitingForWeights" in (found.reason, degraded.reason):
            said += '; tell each engine its weights: POST /update_weight_version {"new_version": ...} on the admin port'
        return f"Current is {said}"


def _text(value: object) -> str | None:
    return None if value is None else str(value)
