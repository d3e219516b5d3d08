"""The wiper: a small store client beside the Mooncake master that removes the keys of one namespace on demand.

*wipe* removes all of them at once, for a fleet that stands still. *collect* removes those of old epochs beside the
load: one removal by pattern of 200,000 keys holds other clients up for seconds, a listing and small batches for
milliseconds (``bench/collect.py``).

``python -m moontide_engine.wiper`` serves HTTP. The store's native client lives in a child process, because a call on
it cannot be interrupted and a client whose master went away may stay useless: after any failure the child is killed and
the next call gets a new one. The client lends no memory (segments of size 0), so the master does not count it as
storage. Beside one of several masters a wipe counts only when their log has it (:mod:`moontide_engine.replicated`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moontide_engine.auth import TokenFile, bearer_tokens
from moontide_engine.jsonlog import log
from moontide_engine.listing import Listing
from moontide_engine.namespace import is_namespace, pattern, tag
from moontide_engine.replicated import Log, Unproven, removal
from moontide_engine.tls import Certificate, certificate

BODY_LIMIT = 64 * 1024
MAX_SECONDS = 600.0
KEYS_TIMEOUT = 30.0
# Keys a call when collecting. After each call the store has as long for itself as the call took.
BATCH = 1000
MAX_KEPT = 16
# A call with less time left begins no other.
BATCH_SECONDS = 0.3
# A master that lists millions of keys says nothing before it has them.
SILENCE_SECONDS = 60.0
# Codes of the store, as its error codes are numbered in 0.3.
OBJECT_NOT_FOUND, RPC_FAIL = -704, -900
# Between two tries to have a connected client ready before it is needed.
WARM_SECONDS = 5.0
# Shorter than the store's own defaults (tens of seconds): a pause waits for this.
CHILD_ENV = {"MC_RPC_CONNECT_TIMEOUT_MS": "500", "MC_RPC_TIMEOUT_MS": "2000"}
# What a client needs to put a key of one byte; one that only removes needs nothing.
PUT_BUFFER = 1 << 20

Answer = dict[str, object]


@dataclass(frozen=True)
class Config:
    """What the wiper is told by its environment."""

    host: str
    port: int
    token_file: str
    master: str
    metrics: str
    log: Log | None = None
    """Where the master is one of several."""
    tls: str = ""
    """Folder of ``tls.crt`` and ``tls.key``; empty: plain HTTP."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Config:
        """Read the environment; raises ValueError on a port that is none, KeyError without a token file."""
        master = env.get("MOONTIDE_MASTER_ADDRESS", "127.0.0.1:50051")
        return cls(
            host=env.get("MOONTIDE_WIPER_HOST", "0.0.0.0"),
            port=int(env.get("MOONTIDE_WIPER_PORT", "9004")),
            token_file=env["MOONTIDE_WIPER_TOKEN_FILE"],
            master=master,
            log=Log.from_env(env, master),
            metrics=env.get("MOONTIDE_MASTER_METRICS", "http://127.0.0.1:9003").rstrip("/"),
            tls=env.get("MOONTIDE_WIPER_TLS", ""),
        )


class ChildFailed(Exception):
    """The child did not do it: ``reason`` for the answer, ``code`` of the store if it gave one."""

    def __init__(self, reason: str, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code


class Child:
    """One child process with one store client."""

    def __init__(self, master: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            env = {**CHILD_ENV, **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moontide_engine.wiper", "--child", str(theirs.fileno()), master],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=env,
            )
        self._socket = ours
        self._buffer = b""
        self.connected = False

    def ask(self, request: Mapping[str, object], timeout: float) -> int:
        """How many objects the store removed. Raises ChildFailed; the child is then of no use any more."""
        deadline = time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in self._buffer:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self._socket.recv(4096)
                if not part:
                    raise ChildFailed("StoreUnavailable", "the store client ended")
                self._buffer += part
        except TimeoutError:
            raise ChildFailed("StoreTimeout", f"the store did not answer within {timeout:.3g} s") from None
        except OSError as error:
            raise ChildFailed("StoreUnavailable", f"the store client is gone: {error}") from None
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        code = int(answer["code"])
        if code < 0 or answer["step"] == "setup":
            raise ChildFailed("StoreUnavailable", f"the store answered {code} to {answer['step']}", code)
        self.connected = True
        return code

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Wiper:
    """Scoped removals, one at a time."""

    def __init__(self, master: str, log: Log | None = None) -> None:
        """``log``: where the master is one of several; then a removal counts when it is in their log."""
        self._master = master
        self._log = log
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._listings: dict[str, Listing] = {}
        """Begun by a call that had no time to end them, by namespace."""
        self._collected_at: dict[str, float] = {}
        """When the last collection that found no more ended: a listing from before it is of no use."""
        self._listings_lock = threading.Lock()
        self._terms: dict[str, int] = {}
        self._terms_lock = threading.Lock()

    def fenced(self, namespace: str, term: int) -> Answer | None:
        """The refusal of a command whose term is lower than one seen before: its leader leads no more. Else None."""
        with self._terms_lock:
            known = self._terms.get(namespace, term)
            self._terms[namespace] = max(known, term)
        if term >= known:
            return None
        answer = {**_failure("Fenced", f"term {term} is over, {known} was seen"), "seconds": 0.0}
        log("fenced", namespace=namespace, **answer)
        return answer

    def wipe(self, namespace: str, timeout: float) -> Answer:
        """Remove the keys of a namespace within ``timeout`` seconds. Never raises for the store's faults."""
        started = time.monotonic()
        deadline = started + timeout
        answer: Answer
        if not self._lock.acquire(timeout=timeout):
            answer = _failure("StoreTimeout", "another removal is still under way")
        else:
            try:
                removed = self._removed(namespace, deadline)
                answer = {"success": True, "removed": removed, "code": removed, "reason": "Done", "message": ""}
            except ChildFailed as error:
                answer = _failure(error.reason, str(error), error.code)
            except Unproven as error:
                answer = _failure(error.reason, str(error))
            finally:
                self._lock.release()
        answer["seconds"] = round(time.monotonic() - started, 6)
        log("wipe", namespace=namespace, **answer)
        return answer

    def _removed(self, namespace: str, deadline: float) -> int:
        """How many keys were removed, for good. Raises ChildFailed and Unproven."""
        marker = f"moontide-wiper@{uuid.uuid4()}"
        removed = removal(
            self._log,
            lambda: self._ask({"remove": pattern(namespace)}, deadline),
            lambda key: self._ask({"put": key}, deadline),
            deadline,
            marker,
        )
        if self._log is not None:
            # It is proven: a marker that stays is evicted some day.
            with contextlib.suppress(ChildFailed):
                self._ask({"keys": [marker]}, deadline)
        return removed

    def collect(self, metrics: str, namespace: str, keep: Sequence[str], timeout: float) -> Answer:
        """Remove the namespace's keys of all epochs but ``keep``, in batches, as far as ``timeout`` seconds reach.

        The next call goes on where this one stopped, within :data:`listing.STALE_SECONDS`. ``removed`` counts this
        call's keys, ``left`` the old ones of the listing that are still there: some were in use, or no time was left.
        A success means that the listing has been gone through and none is left. Never raises for the store's faults.
        """
        started = time.monotonic()
        deadline = started + timeout
        removed = 0
        answer: Answer
        listing: Listing | None = None
        try:
            if self._log is not None:
                self._log.begin()
            listing = self._listing(metrics, namespace, frozenset(tag(epoch).hex() for epoch in keep))
            listing.wait(deadline - time.monotonic())
            if listing.error is not None:
                raise ChildFailed("StoreUnavailable", str(listing.error))
            while listing.is_whole and not listing.is_done and deadline - time.monotonic() > BATCH_SECONDS:
                gone = self._remove(listing.batch(BATCH), deadline)
                removed += gone
                listing.removed += gone
            answer = _collected(listing, removed)
            if not listing.is_done:
                self._keep(namespace, listing)
                listing = None
            elif answer["success"]:
                with self._listings_lock:
                    self._collected_at[namespace] = time.monotonic()
        except ChildFailed as error:
            # What became of the batch is not known, so the next call begins anew.
            answer = {**_failure(error.reason, str(error), error.code), "removed": removed, "left": None}
        except Unproven as error:
            answer = {**_failure(error.reason, str(error)), "removed": removed, "left": None}
        if listing is not None:
            listing.close()
        answer["seconds"] = round(time.monotonic() - started, 6)
        log("collect", namespace=namespace, keep=list(keep), **answer)
        return answer

    def _listing(self, metrics: str, namespace: str, tags: frozenset[str]) -> Listing:
        """What the last call for these epochs has left, or a new one. Nobody else has it."""
        with self._listings_lock:
            known = self._listings.pop(namespace, None)
            past = self._collected_at.get(namespace, 0.0)
        if known is not None:
            if known.tags == tags and known.began >= past and known.error is None and not known.is_stale:
                return known
            known.close()
        return Listing(lambda: list_keys(metrics, SILENCE_SECONDS), namespace, tags)

    def _keep(self, namespace: str, listing: Listing) -> None:
        """Leave it for the next call."""
        with self._listings_lock:
            other = self._listings.pop(namespace, None)
            self._listings[namespace] = listing
        if other is not None:
            other.close()

    def tidy(self, everything: bool = False) -> None:
        """Forget listings that nobody came back for, or all."""
        with self._listings_lock:
            over = [name for name, each in self._listings.items() if everything or each.is_stale]
            listings = [self._listings.pop(name) for name in over]
        for each in listings:
            each.close()

    def _remove(self, keys: list[str], deadline: float) -> int:
        """One batch. A wipe may come between two: a fleet that stands still goes first."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=max(deadline - began, 0.001)):
            raise ChildFailed("StoreTimeout", "another removal is still under way")
        try:
            began = time.monotonic()
            removed = self._ask({"keys": keys}, deadline)
        finally:
            self._lock.release()
        time.sleep(max(0.0, min(time.monotonic() - began, deadline - time.monotonic())))
        return removed

    def warm(self) -> None:
        """Have a connected client ready, if nobody is using the wiper and there is none."""
        self.tidy()
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._child is None:
                with contextlib.suppress(ChildFailed):
                    self._ask({"connect": True}, time.monotonic() + WARM_SECONDS)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the child."""
        self.tidy(everything=True)
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _ask(self, request: Mapping[str, object], deadline: float) -> int:
        """Ask the child at hand, and a new one if that one had worked before: its master may have been restarted."""
        while True:
            reach(self._master, deadline - time.monotonic())
            if self._child is None:
                self._child = Child(self._master)
            child = self._child
            had_worked = child.connected
            try:
                return child.ask(request, max(deadline - time.monotonic(), 0.001))
            except ChildFailed as error:
                self.close()
                if not had_worked or error.reason == "StoreTimeout":
                    raise


def reach(master: str, timeout: float) -> None:
    """Raise ChildFailed at once if nobody listens at the master's address: the native client would try on for long."""
    host, _, port = master.rpartition(":")
    if not port.isdigit() or "://" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=max(timeout, 0.001)).close()
    except TimeoutError:
        raise ChildFailed("StoreTimeout", f"{master} did not accept a connection in time") from None
    except OSError as error:
        raise ChildFailed("StoreUnavailable", f"{master} cannot be reached: {error}") from None


def _failure(reason: str, message: str, code: int = 0) -> Answer:
    return {"success": False, "removed": None, "code": code, "reason": reason, "message": message}


def list_keys(metrics: str, silence: float) -> Iterator[str]:
    """All keys, from the master's own listing. Slow with many keys: never inside a pause.

    Raises OSError, also where nothing comes for ``silence`` seconds or the master ends before its listing, and
    HTTPException.
    """
    with urllib.request.urlopen(f"{metrics}/get_all_keys", timeout=silence) as response:
        for line in response:
            yield line.decode(errors="replace").strip()
        if response.length:
            raise OSError(f"the master's listing ended {response.length} bytes early")


def _collected(listing: Listing, removed: int) -> Answer:
    """What a call that removed so many came to."""
    answer: Answer = {"success": False, "removed": removed, "left": None, "code": removed, "reason": "KeysLeft"}
    if not listing.is_whole:
        return {**answer, "message": f"the master still lists its keys, {listing.found} old ones so far: ask again"}
    left = listing.found - listing.removed
    if not listing.is_done:
        return {**answer, "left": left, "message": f"no time was left for {left} keys: ask again"}
    if left:
        return {**answer, "left": left, "message": f"{left} keys were not removed: they are in use"}
    return {**answer, "success": True, "left": 0, "reason": "Done", "message": ""}


def count_keys(metrics: str, namespace: str, timeout: float) -> Answer:
    """Count the keys of a namespace from the master's own listing. Slow with many keys: never inside a pause."""
    started = time.monotonic()
    prefix = f"{namespace}@"
    answer: Answer
    try:
        count = sum(key.startswith(prefix) for key in list_keys(metrics, timeout))
        answer = {"success": True, "keys": count, "reason": "Done", "message": ""}
    except OSError as error:
        answer = {"success": False, "keys": None, "reason": "StoreUnavailable", "message": str(error)}
    answer["seconds"] = round(time.monotonic() - started, 6)
    return answer


def make_server(config: Config, wiper: Wiper) -> ThreadingHTTPServer:
    """The HTTP server, bound and not yet serving. Raises CertificateError."""
    tokens = TokenFile(config.token_file)
    served = certificate(config.tls)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            if url.path == "/healthz":
                self._answer(200, {"ok": True})
            elif not self._allowed():
                return
            elif url.path != "/moontide/v1/keys":
                self._refuse(404, "NotFound", "no such route")
            else:
                query = urllib.parse.parse_qs(url.query)
                names = query.get("namespace", [])
                if set(query) != {"namespace"} or len(names) != 1 or not is_namespace(names[0]):
                    self._refuse(400, "BadRequest", "one query parameter is needed: namespace=<uid>")
                else:
                    self._answer(200, count_keys(config.metrics, names[0], KEYS_TIMEOUT))

        def do_POST(self) -> None:
            if not self._allowed():
                return
            collects = self.path == "/moontide/v1/collect"
            if not collects and self.path != "/moontide/v1/wipe":
                self._refuse(404, "NotFound", "no such route")
                return
            body = self._body(check_collect if collects else check_body)
            if body is None:
                return
            namespace, seconds = body["namespace"], float(body["timeoutSeconds"])
            refusal = wiper.fenced(namespace, body["term"])
            if refusal is not None:
                self._answer(200, refusal)
            elif collects:
                self._answer(200, wiper.collect(config.metrics, namespace, body["keep"], seconds))
            else:
                self._answer(200, wiper.wipe(namespace, seconds))

        def log_message(self, format: str, *args: Any) -> None:
            """No access log: each removal writes its own line."""

        def _allowed(self) -> bool:
            headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
            if tokens.accepts(bearer_tokens(headers)):
                return True
            self._refuse(401, "Unauthorized", "a valid bearer token is needed")
            return False

        def _body(self, check: Callable[[object], str]) -> dict[str, Any] | None:
            try:
                length = int(self.headers.get("content-length", ""))
            except ValueError:
                length = -1
            if not 0 <= length <= BODY_LIMIT:
                self._refuse(400, "BadRequest", f"a body of at most {BODY_LIMIT} bytes with content-length is needed")
                return None
            try:
                body = json.loads(self.rfile.read(length))
            except (ValueError, RecursionError):
                self._refuse(400, "BadRequest", "the body is not JSON", drop=False)
                return None
            problem = check(body)
            if problem:
                self._refuse(400, "BadRequest", problem, drop=False)
                return None
            valid: dict[str, Any] = body
            return valid

        def _refuse(self, status: int, reason: str, message: str, drop: bool = True) -> None:
            # An unread body would be taken for the next request on a kept connection.
            self.close_connection = self.close_connection or drop
            self._answer(status, {**_failure(reason, message), "seconds": 0.0})

        def _answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            if status == 401:
                self.send_header("www-authenticate", "Bearer")
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            return (connection if served is None else _over_tls(connection, served)), address

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that leaves early is no event."""

    return Server((config.host, config.port), Handler)


def _over_tls(connection: socket.socket, served: Certificate) -> socket.socket:
    """The connection, whose handshake comes with its first read: in the connection's own thread."""
    served.look()
    return served.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def check_body(body: object) -> str:
    """What is wrong with the body of a wipe, empty if nothing is."""
    if not isinstance(body, dict):
        return "the body is not a JSON object"
    if unknown := sorted(set(body) - {"term", "namespace", "timeoutSeconds"}):
        return f"unknown field {', '.join(map(repr, unknown))}; known: term, namespace, timeoutSeconds"
    term = body.get("term")
    if not isinstance(term, int) or isinstance(term, bool) or term < 0:
        return "field 'term' must be a whole number from 0: the term of the leader that sends it"
    if not is_namespace(body.get("namespace")):
        return "field 'namespace' must be letters, digits, dot, dash and underscore"
    seconds = body.get("timeoutSeconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MAX_SECONDS:
        return f"field 'timeoutSeconds' must be a number above 0 and at most {MAX_SECONDS:g}"
    return ""


def check_collect(body: object) -> str:
    """What is wrong with the body of a collection, empty if nothing is."""
    if not isinstance(body, dict):
        return check_body(body)
    keep = body.get("keep")
    if not isinstance(keep, list) or not 0 < len(keep) <= MAX_KEPT or not all(isinstance(e, str) and e for e in keep):
        return f"field 'keep' must be a list of 1 to {MAX_KEPT} epochs, each the salt that engines were admitted with"
    return check_body({name: value for name, value in body.items() if name != "keep"})


def run_child(descriptor: int, master: str) -> None:
    """The child: one client, one request a line. Ends with its parent, or when the client cannot be set up."""
    channel = socket.socket(fileno=descriptor)
    store: Any = None
    with channel.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            step = "setup"
            code = 0
            if store is None:
                store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
                host = os.environ.get("MOONTIDE_WIPER_HOSTNAME", "127.0.0.1")
                buffer = PUT_BUFFER if os.environ.get("MOONTIDE_ETCD_ENDPOINTS") else 0
                code = store.setup(host, "P2PHANDSHAKE", 0, buffer, "tcp", "", master)
            if code == 0:
                step = "connect"
                if "remove" in request:
                    step = "remove_by_regex"
                    code = store.remove_by_regex(request["remove"], True)
                elif "put" in request:
                    step = "put"
                    code = store.put(request["put"], b"m")
                elif "keys" in request:
                    step = "batch_remove"
                    # Not by force: what is in use has a lease and goes another time.
                    codes = store.batch_remove(request["keys"], False)
                    gone = sum(each in (0, OBJECT_NOT_FOUND) for each in codes)
                    code = RPC_FAIL if RPC_FAIL in codes else gone
            channel.sendall(json.dumps({"step": step, "code": code}).encode() + b"\n")
    # Not through the client's destructor: it may wait for a master that is gone.
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Command line."""
    if arguments[:1] == ["--child"]:
        run_child(int(arguments[1]), arguments[2])
        return 0
    if arguments:
        print("usage: python -m moontide_engine.wiper", file=sys.stderr)
        return 2
    config = Config.from_env(os.environ)
    wiper = Wiper(config.master, config.log)
    server = make_server(config, wiper)
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        threading.Thread(target=server.shutdown, daemon=True).start()

    def keep_warm() -> None:
        while not stopping.is_set():
            wiper.warm()
            stopping.wait(WARM_SECONDS)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=keep_warm, daemon=True).start()
    log("wiper-started", port=config.port, master=config.master, tls=bool(config.tls))
    server.serve_forever(poll_interval=0.2)
    server.server_close()
    wiper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
