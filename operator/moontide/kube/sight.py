"""What the watches have shown, and what was applied to it. No I/O.

The API server's events are kept, without what nobody reads. Nothing here is older than the watch that brings it; a
watch that has lost an event is found out by a listing of names and versions (:meth:`Sight.compare`).
"""

from __future__ import annotations

import json
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moontide import labels
from moontide.resources import admintls

Key = tuple[str, str, str]
"""Plural, namespace, name."""
_KEPT = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations", "ownerReferences"),
    *("creationTimestamp", "deletionTimestamp"),
)
"""Of metadata."""
_REVISION = "deployment.kubernetes.io/revision"
_TOMBS = 4096
_BODILESS = ("services", "configmaps")
"""Only whether they are as they were applied is asked of these."""


@dataclass(frozen=True)
class Seen:
    """An object at one moment."""

    uid: str
    version: int
    shape: object
    """Equal in two moments only where nothing but the status differs; of kinds without a status, where nothing does."""
    owners: frozenset[str]
    """UIDs of its controllers."""
    labels: Mapping[str, str]
    body: dict[str, Any] | None
    made: dict[str, Any] = field(default_factory=dict, compare=False)
    """What readers made of the body: it is gone with it."""


@dataclass(frozen=True)
class Applied:
    """One apply that the API server took."""

    digest: str
    uid: str
    shape: object
    owner: str
    at: float
    luck: float
    """From 0.75 to 1.25: what was applied together does not lapse together."""


def version_of(metadata: Mapping[str, Any]) -> int:
    """The resourceVersion. The API server's are numbers that grow; one that is none is 0, and is never kept."""
    said = str(metadata.get("resourceVersion") or "")
    return int(said) if said.isdigit() else 0


def slim(plural: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is read of an object."""
    if plural in _BODILESS:
        return None
    kept = {"metadata": {key: value for key, value in body["metadata"].items() if key in _KEPT}}
    if body.get("status") is not None:
        kept["status"] = body["status"]
    spec = body.get("spec") or {}
    if plural == "deployments":
        grace = ((spec.get("template") or {}).get("spec") or {}).get("terminationGracePeriodSeconds")
        pods = {"containers": [], **({} if grace is None else {"terminationGracePeriodSeconds": grace})}
        kept["spec"] = {"replicas": spec.get("replicas"), "selector": {}, "template": {"spec": pods}}
    elif plural != "pods":
        kept["spec"] = spec
    elif (told := admintls.told_by(spec)) is not None:
        kept["spec"] = told
    return kept


def _shape(plural: str, metadata: Mapping[str, Any], version: int) -> object:
    if plural != "deployments":
        return version
    notes = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != _REVISION}
    rest = {key: metadata.get(key) or None for key in ("generation", "labels", "ownerReferences", "deletionTimestamp")}
    return json.dumps({**rest, "annotations": notes}, sort_keys=True)


class Sight:
    """The objects of the kinds that are watched, each as it was seen last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._objects: dict[str, dict[Key, Seen]] = defaultdict(dict)
        self._tombs: OrderedDict[Key, int] = OrderedDict()
        self._labelled: dict[tuple[str, str, str, str], set[Key]] = defaultdict(set)
        self._applied: dict[Key, Applied] = {}
        self._children: dict[str, set[Key]] = defaultdict(set)
        self.complete: set[str] = set()
        """Plurals of which all that there is was seen, at the last comparison."""

    # What is there ------------------------------------------------------------------------------------------------

    def saw(self, plural: str, body: Mapping[str, Any], deleted: bool = False) -> bool:
        """An event or an answer of the API server. False where it is nothing new."""
        metadata = body["metadata"]
        key, version = (plural, metadata.get("namespace") or "", metadata["name"]), version_of(metadata)
        if not version:
            return True
        known = self._objects[plural].get(key)
        if max(known.version if known is not None else 0, self._tombs.get(key, 0)) >= version:
            return False
        if deleted:
            self._bury(key, version)
            return True
        if known is not None:
            self._unindex(key, known)
        owners = frozenset(each["uid"] for each in metadata.get("ownerReferences") or () if each.get("controller"))
        shape, marks = _shape(plural, metadata, version), dict(metadata.get("labels") or {})
        self._objects[plural][key] = Seen(str(metadata["uid"]), version, shape, owners, marks, slim(plural, body))
        for place in self._places(key, marks):
            self._labelled[place].add(key)
        return True

    def get(self, plural: str, namespace: str, name: str) -> Seen | None:
        """The object as it was seen last."""
        return self._objects[plural].get((plural, namespace, name))

    def every(self, plural: str, namespaces: Collection[str] | None) -> list[Seen]:
        """Those of some namespaces that have a body, or of all: by namespace and name."""
        objects = self._objects[plural]
        keys = sorted(key for key in objects if namespaces is None or key[1] in namespaces)
        return [objects[key] for key in keys if objects[key].body is not None]

    def selected(self, plural: str, namespace: str, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """The bodies of a namespace that have these labels, by name. One of the labels names a fleet or a pool."""
        places = self._places((plural, namespace, ""), wanted)
        found = []
        for key in sorted(self._labelled.get(places[0], ())):
            seen = self._objects[plural][key]
            if seen.body is not None and all(seen.labels.get(label) == value for label, value in wanted.items()):
                found.append(seen.body)
        return found

    def compare(self, plural: str, listed: Mapping[Key, int], version: int) -> tuple[list[tuple[Key, Seen]], set[Key]]:
        """Take out what a listing at ``version`` does not hold any more. Returns that, and what was not seen as new as
        it is listed."""
        known = self._objects[plural]
        gone = [(key, seen) for key, seen in known.items() if key not in listed and seen.version <= version]
        for key, seen in gone:
            self._bury(key, seen.version)
        return gone, self.behind(plural, listed)

    def behind(self, plural: str, listed: Mapping[Key, int]) -> set[Key]:
        """Those of ``listed`` that were not seen in that version or a later one, nor as deleted."""
        known = self._objects[plural]
        return {
            key
            for key, version in listed.items()
            if max(known[key].version if key in known else 0, self._tombs.get(key, 0)) < version
        }

    def _bury(self, key: Key, version: int) -> None:
        self._tombs[key] = version
        self._tombs.move_to_end(key)
        if len(self._tombs) > _TOMBS:
            self._tombs.popitem(last=False)
        seen = self._objects[key[0]].pop(key, None)
        self.forget(key)
        if seen is None:
            return
        self._unindex(key, seen)
        for child in list(self._children.get(seen.uid, ())):
            self.forget(child)

    def _unindex(self, key: Key, seen: Seen) -> None:
        for place in self._places(key, seen.labels):
            self._labelled[place].discard(key)
            if not self._labelled[place]:
                del self._labelled[place]

    @staticmethod
    def _places(key: Key, marks: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
        of = (labels.DEPLOYMENT, labels.POOL)
        return [(key[0], key[1], label, marks[label]) for label in of if label in marks]

    # What was applied ---------------------------------------------------------------------------------------------

    def applied(self, key: Key, digest: str, owner: str, metadata: Mapping[str, Any]) -> None:
        """The API server took an apply, and answered with an object of this ``metadata``."""
        shape, luck = _shape(key[0], metadata, version_of(metadata)), random.uniform(0.75, 1.25)
        self._applied[key] = Applied(digest, str(metadata["uid"]), shape, owner, self._clock(), luck)
        self._children[owner].add(key)

    def stands(self, key: Key, digest: str, seconds: float | None = None) -> bool:
        """Whether an apply of the same would change nothing. With ``seconds``: if it was made not longer ago, which is
        all that can be said of a kind that is not watched."""
        made = self._applied.get(key)
        if made is None or made.digest != digest:
            return False
        if seconds is not None:
            return self._clock() - made.at < seconds * made.luck
        seen = self._objects[key[0]].get(key)
        return key[0] in self.complete and seen is not None and (seen.uid, seen.shape) == (made.uid, made.shape)

    def uid_of(self, key: Key, owner: str) -> str | None:
        """UID of the object to which ``owner`` applied last."""
        made = self._applied.get(key)
        return made.uid or None if made is not None and made.owner == owner else None

    def forget(self, key: Key) -> None:
        """Nothing is known of what was applied."""
        made = self._applied.pop(key, None)
        if made is not None:
            self._children[made.owner].discard(key)
            if not self._children[made.owner]:
                del self._children[made.owner]

    def __len__(self) -> int:
        return sum(len(each) for each in self._objects.values())


def named(plural: str, metadatas: Iterable[Mapping[str, Any]]) -> dict[Key, int]:
    """A listing, as :meth:`Sight.compare` takes it."""
    return {(plural, each.get("namespace") or "", each["name"]): version_of(each) for each in metadatas}
