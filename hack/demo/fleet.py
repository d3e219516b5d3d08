"""A fleet as its users see it: ask a replica, read its counters, push weights to it as a trainer does."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from hack.demo.kube import Kube, KubeError, NotInTime, Object, condition, is_current, wait
from hack.demo.reach import Reach
from moontide import labels, naming

MAX_TOKENS = 16
ASK_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """What one request got. ``status`` 0 is an error of the connection; times are seconds since 1970."""

    prompt: int
    replica: str
    status: int
    version: str | None = None
    epoch: int | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cached: int | None = None
    prompt_tokens: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: str = ""
    last_epoch: int | None = None
    """Where it ended, if that is not the epoch in which it began."""

    @property
    def seconds(self) -> float:
        """How long the client waited."""
        return self.ended - self.began


@dataclass(frozen=True)
class Counters:
    """Prefix-cache hits of one engine since it started, in tokens."""

    local: int
    external: int


class Replica:
    """One engine: its inference port as a client, its admin port as a trainer."""

    def __init__(self, pod: Object, reach: Reach, token: str) -> None:
        self.pod = pod
        self.name: str = pod["metadata"]["name"]
        self.uid: str = pod["metadata"]["uid"]
        self._reach = reach
        self.token = token
        self._http = httpx.Client(timeout=ASK_SECONDS, trust_env=False)

    @property
    def inference(self) -> str:
        """Base URL of the inference port."""
        return self._reach.url(self.pod, naming.INFERENCE_PORT)

    @property
    def admin(self) -> str:
        """Base URL of the admin port."""
        return self._reach.url(self.pod, naming.ADMIN_PORT)

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def ask(self, model: str, number: int, prompt: str, *, tokens: int = MAX_TOKENS, salt: str | None = None) -> Answer:
        """A greedy answer of exactly ``tokens`` tokens. A ``salt`` of one's own shares no cached block with anybody."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        began = time.time()
        try:
            response = self._http.post(f"{self.inference}/v1/completions", json=body)
        except (httpx.HTTPError, OSError) as error:
            return Answer(number, self.name, 0, began=began, ended=time.time(), error=type(error).__name__)
        ended = time.time()
        version, epoch = response.headers.get("x-moontide-version"), response.headers.get("x-moontide-epoch")
        stamp = (version, int(epoch) if epoch is not None else None)
        if response.status_code != 200:
            said = response.text[:200]
            return Answer(number, self.name, response.status_code, *stamp, began=began, ended=ended, error=said)
        answer = response.json()
        choice, usage = answer["choices"][0], answer["usage"]
        details = usage.get("prompt_tokens_details")
        return Answer(
            number,
            self.name,
            200,
            *stamp,
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            cached=None if details is None else int(details["cached_tokens"] or 0),
            prompt_tokens=int(usage["prompt_tokens"]),
            began=began,
            ended=ended,
            error="" if choice["finish_reason"] == "length" else f"finished: {choice['finish_reason']}",
            last_epoch=int(response.headers["x-moontide-last-epoch"])
            if "x-moontide-last-epoch" in response.headers
            else None,
        )

    def counters(self) -> Counters:
        """Hits, from the engine's own metrics."""
        response = self._http.get(f"{self.inference}/metrics")
        response.raise_for_status()
        return Counters(
            _sum(response.text, "vllm:prefix_cache_hits_total"),
            _sum(response.text, "vllm:external_prefix_cache_hits_total"),
        )

    def command(
        self,
        path: str,
        body: Object | None = None,
        *,
        params: dict[str, str] | None = None,
        timeout: float = ASK_SECONDS,
    ) -> httpx.Response:
        """POST to the admin port, whatever it answers."""
        headers = {"authorization": f"Bearer {self.token}"}
        return self._http.post(f"{self.admin}{path}", json=body, params=params, headers=headers, timeout=timeout)

    def look(self, path: str = "/moontide/v1/status", *, timeout: float = ASK_SECONDS) -> Object:
        """GET from the admin port. Raises httpx.HTTPError when that fails."""
        headers = {"authorization": f"Bearer {self.token}"}
        response = self._http.get(f"{self.admin}{path}", headers=headers, timeout=timeout)
        response.raise_for_status()
        found: Object = response.json()
        return found

    def push_weights(self, path: str, version: str, *, timeout: float = ASK_SECONDS) -> float:
        """Load weights into the running engine and label them, as a trainer does; gives seconds, raises on failure."""
        began = time.monotonic()
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self.command("/collective_rpc", body, timeout=timeout).raise_for_status()
        self.command("/update_weight_version", {"new_version": version}, timeout=timeout).raise_for_status()
        reported = self.look("/weight_info", timeout=timeout)["weight_version"]
        if reported != version:
            raise RuntimeError(f"{self.name} reports weights {reported!r} after {version!r} was pushed")
        return time.monotonic() - began


def _sum(text: str, name: str) -> int:
    """Sum of a counter's samples in the Prometheus text format; KeyError when there is none."""
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not values:
        raise KeyError(name)
    return round(sum(float(value) for value in values))


@dataclass(frozen=True)
class Store:
    """The pool's master: which keys are in it."""

    pod: Object
    reach: Reach
    token: str

    def keys(self, namespace: str) -> frozenset[str]:
        """Names of a deployment's keys, from the master's own listing."""
        url = f"{self.reach.url(self.pod, naming.MASTER_METRICS_PORT)}/get_all_keys"
        response = httpx.get(url, timeout=30, trust_env=False)
        response.raise_for_status()
        return frozenset(line.strip() for line in response.text.splitlines() if line.startswith(f"{namespace}@"))

    def counted(self, namespace: str) -> int:
        """Number of a deployment's keys as the wiper counts them."""
        url = f"{self.reach.url(self.pod, naming.WIPER_PORT)}/moontide/v1/keys"
        headers = {"authorization": f"Bearer {self.token}"}
        response = httpx.get(url, params={"namespace": namespace}, headers=headers, timeout=30, trust_env=False)
        response.raise_for_status()
        found = response.json()
        if found.get("success") is not True:
            raise RuntimeError(f"the wiper does not count: {found}")
        return int(found["keys"])


@dataclass
class Fleet:
    """An InferenceDeployment with its pool and policy, by their names."""

    kube: Kube
    reach: Reach
    namespace: str
    deployment: str = "tiny"
    pool: str = "pool"
    policy: str = "policy"
    model: str = "tiny"
    _known: dict[str, Replica] = field(default_factory=dict)

    def pods(self) -> list[Object]:
        """Running engine pods that are not ending, by name."""
        found = self.kube.list("pods", self.namespace, labels.selector(labels.engine_labels(self.deployment)))
        running = [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
        ]
        return sorted(running, key=lambda pod: str(pod["metadata"]["name"]))

    def replicas(self) -> list[Replica]:
        """Engines of the running pods. The same pod gives the same object."""
        token = self.kube.secret(naming.admin_secret(self.deployment), "token", self.namespace).split()[0]
        for pod in self.pods():
            uid = pod["metadata"]["uid"]
            if uid not in self._known:
                self._known[uid] = Replica(pod, self.reach, token)
            # It may have been rotated.
            self._known[uid].token = token
        present = {pod["metadata"]["uid"] for pod in self.pods()}
        return sorted((each for uid, each in self._known.items() if uid in present), key=lambda each: each.name)

    def store(self) -> Store:
        """The pool's running master."""
        pods = self.kube.list("pods", self.namespace, labels.selector(labels.store_labels(self.pool)))
        running = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("podIP")]
        if not running:
            raise KubeError(f"pool {self.pool} has no running master")
        tokens = self.kube.secret(naming.wiper_secret(self.pool), "token", self.namespace).split()
        return Store(running[0], self.reach, tokens[0])

    def close(self) -> None:
        """Close every connection and end what was started to reach pods."""
        self.leave()
        self.reach.close()

    def leave(self) -> None:
        """Close the connections to its replicas; what was started to reach pods is somebody else's."""
        for replica in self._known.values():
            replica.close()

    @property
    def key_namespace(self) -> str:
        """The prefix of this fleet's keys in the store: its UID."""
        return str(self.kube.get("ifd", self.deployment, self.namespace)["metadata"]["uid"])

    def get_policy(self) -> Object:
        """The PolicyVersion as it is now."""
        return self.kube.get("polv", self.policy, self.namespace)

    def until_current(self, version: str, seconds: float, note: Callable[[str], None] = lambda _: None) -> Object:
        """The PolicyVersion once every replica serves ``version``; ``note`` hears each new state of ``Current``.

        Raises NotInTime with the last status seen.
        """
        deadline, seen, policy = time.monotonic() + seconds, "", self.get_policy()
        while (left := deadline - time.monotonic()) > 0:
            # A watch may end early, when the API server closes it.
            with self.kube.watch("polv", self.policy, self.namespace, left) as states:
                for policy in states:
                    found = condition(policy, "Current")
                    text = f"Current={found['status']} ({found['reason']}) {found.get('message', '')}"
                    if text != seen:
                        note(text)
                        seen = text
                    if is_current(policy, version):
                        return policy
        raise NotInTime(f"Current=True for version {version}: not within {seconds:g} s. {policy.get('status')}")

    def prepare(self, version: int | str, seconds: float) -> Object:
        """Announce a version and wait until its weights may be pushed; the PolicyVersion. Raises NotInTime."""
        self.kube.merge("polv", self.policy, self.namespace, {"spec": {"preparing": version}})

        def done() -> Object | None:
            policy = self.get_policy()
            preparation = policy["status"].get("preparation") or {}
            return policy if preparation.get("version") == str(version) and preparation.get("preparedAt") else None

        return wait(done, seconds, "Prepared", every=0.1, last=lambda: str(self.get_policy().get("status")))

    def commit(self, version: int | str) -> Object:
        """The weights of a prepared version are in; returns the patched object."""
        return self.kube.merge("polv", self.policy, self.namespace, {"spec": {"version": version, "preparing": None}})

    def until_collected(self, seconds: float) -> Object:
        """The PolicyVersion once every older key is removed, and that was verified. Raises NotInTime."""

        def done() -> Object | None:
            policy = self.get_policy()
            return policy if policy["status"]["lastUpdate"].get("wipedAt") else None

        return wait(done, seconds, "old keys to be removed", last=lambda: str(self.get_policy().get("status")))

    def bump(self, version: int | str) -> Object:
        """``kubectl patch`` of the version; returns the patched object."""
        return self.kube.merge("polv", self.policy, self.namespace, {"spec": {"version": version}})


def push_weights(replicas: Sequence[Replica], path: str, version: str) -> dict[str, float]:
    """Push to every replica at once; seconds by replica. Raises the first failure."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(replicas)) as pool:
        seconds = pool.map(lambda each: each.push_weights(path, version), replicas)
        return dict(zip([each.name for each in replicas], seconds, strict=True))
