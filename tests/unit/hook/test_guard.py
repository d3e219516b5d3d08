"""Who passes, what is remembered, and what a refusal says."""

from __future__ import annotations

import pytest

from moontide.hook.errors import Refusal
from moontide.hook.guard import Guard
from moontide.kube.reviews import Right, User
from tests.unit.hook.hookkit import Reviews

GET = Right("get", "moontide.dev", "policyversions", "rl", "policy")
PATCH = Right("patch", "moontide.dev", "policyversions", "rl", "policy")
BUMP = Right("bump", "moontide.dev", "policyversions", "rl", "policy")
TOKEN = Right("get", "", "secrets", "rl", "tiny-admin")
GOOD = "Bearer good"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Guard, Reviews, Clock]:
    reviews, clock = Reviews(), Clock()
    return Guard(reviews, "moontide", 5.0, clock), reviews, clock


@pytest.mark.parametrize("header", [None, "", "Basic good", "Bearer", "Bearer  "])
async def test_no_token(header: str | None) -> None:
    guard, reviews, _ = make()
    with pytest.raises(Refusal, match="kubectl create token SERVICEACCOUNT -n NAMESPACE --audience moontide") as raised:
        await guard.user(header)
    assert (raised.value.status, raised.value.headers) == (401, {"WWW-Authenticate": 'Bearer realm="moontide"'})
    assert not reviews.asked


async def test_a_wrong_token_is_asked_about_each_time() -> None:
    guard, reviews, _ = make()
    for _ in range(2):
        with pytest.raises(Refusal, match=r"or has expired \(unknown\); make one") as raised:
            await guard.user("Bearer s3cret")
        assert raised.value.status == 401
        assert raised.value.headers["WWW-Authenticate"].endswith('error="invalid_token"')
        assert "s3cret" not in str(raised.value)
    assert reviews.asked["whose"] == 2


async def test_what_is_allowed_is_remembered_for_seconds() -> None:
    guard, reviews, clock = make()
    for _ in range(3):
        assert (await guard.require(GOOD, GET, PATCH)).name == "system:serviceaccount:rl:trainer"
    assert reviews.asked == {"whose": 1, "get policyversions": 1, "patch policyversions": 1}
    clock.now += 5.0
    reviews.users.clear()
    with pytest.raises(Refusal):
        await guard.require(GOOD, GET)


async def test_a_refusal_forgets_what_was_allowed() -> None:
    guard, reviews, _ = make()
    await guard.require(GOOD, GET)
    reviews.refused = {"patch policyversions", "get policyversions"}
    await guard.require(GOOD, GET)
    for right in (PATCH, GET):
        with pytest.raises(Refusal) as raised:
            await guard.require(GOOD, right)
        assert raised.value.status == 403
    reviews.refused.clear()
    await guard.require(GOOD, PATCH)
    assert reviews.asked["patch policyversions"] == 2


async def test_a_refusal_says_which_role_to_write() -> None:
    guard, reviews, _ = make()
    reviews.refused = {"patch policyversions", "get secrets"}
    assert await guard.refused(GOOD, PATCH) == (
        'system:serviceaccount:rl:trainer may not patch policyversions.moontide.dev "policy" in namespace "rl"; write '
        "a Role and bind it: kubectl create role moontide-trainer-policyversions -n rl --verb=get,patch "
        "--resource=policyversions.moontide.dev --resource-name=policy && kubectl create rolebinding "
        "moontide-trainer-policyversions -n rl --role=moontide-trainer-policyversions --serviceaccount=rl:trainer"
    )
    reviews.users["good"] = User("o'brien")
    said = await guard.refused("bearer good", TOKEN)
    assert "--verb=get --resource=secrets --resource-name=tiny-admin" in said
    assert said.endswith("""--user='o'"'"'brien'""")


async def test_of_several_verbs_any_is_enough() -> None:
    guard, reviews, clock = make()
    for refused, asked in (({"patch policyversions"}, "bump"), ({"bump policyversions"}, "patch")):
        reviews.refused = refused
        for _ in range(3):
            await guard.require(GOOD, GET, (PATCH, BUMP))
        assert reviews.asked[f"{asked} policyversions"] == 1
        reviews.asked.clear()
        clock.now += 5.0
    reviews.refused = {"patch policyversions", "bump policyversions"}
    with pytest.raises(Refusal) as raised:
        await guard.require(GOOD, GET, (PATCH, BUMP))
    assert raised.value.status == 403
    assert str(raised.value).startswith(
        'system:serviceaccount:rl:trainer may not patch policyversions.moontide.dev "policy" in namespace "rl", '
        "nor bump it; write a Role and bind it: kubectl create role moontide-trainer-policyversions -n rl "
        "--verb=get,bump --resource=policyversions.moontide.dev "
    )
    # It has forgotten what it knew of that token.
    await guard.require(GOOD, GET)
    assert reviews.asked["get policyversions"] == 2
    reviews.refused = {"patch policyversions"}
    with pytest.raises(Refusal):
        await guard.require(GOOD, PATCH)


async def test_an_api_server_that_is_away_is_no_refusal() -> None:
    guard, reviews, _ = make()
    reviews.away = True
    with pytest.raises(Refusal) as raised:
        await guard.user(GOOD)
    assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "3"})
    reviews.away = False
    await guard.user(GOOD)
    reviews.away = True
    with pytest.raises(Refusal) as raised:
        await guard.require(GOOD, GET)
    assert raised.value.status == 503


async def test_memory_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.hook.guard._MEMORY", 2)
    guard, reviews, _ = make()
    for name in ("a", "b", "c", "a"):
        reviews.users[name] = User(name)
        await guard.user(f"Bearer {name}")
    assert reviews.asked["whose"] == 4
