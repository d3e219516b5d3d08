"""JSON that the API server reads as YAML."""

from __future__ import annotations

import json

import aiohttp
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from moontide.kube.applying import APPLY, readable_as_yaml, yaml_of

PRINTABLE = st.text(st.characters(exclude_categories=["Cs"]))
TRICKS = st.lists(
    st.sampled_from(["\\", "\\\\", "ud83d", "\\ud83d", "\U0001f600", '"', "\x00", "\x85", "\u2028", "u"])
).map("".join)


@given(st.one_of(PRINTABLE, TRICKS))
def test_nothing_is_lost(text: str) -> None:
    made = yaml_of(json.dumps({text: [text]}))
    assert json.loads(made) == {text: [text]}
    assert "\\ud8" not in made.replace("\\\\", "").lower()


def test_a_reader_of_yaml_gets_what_was_meant() -> None:
    body = {"a": "\U0001f600 \\ud83d \\U0001f600 \x00 \x7f \x85 \u2028 \ufeff", "b": "plain"}
    assert yaml.safe_load(yaml_of(json.dumps(body))) == body
    plain = json.dumps({"b": '\u00e9 \\ "'})
    assert yaml_of(plain) == plain


async def test_only_what_is_applied_is_changed() -> None:
    got: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.read())
        assert int(request.headers.get("Content-Length", "0")) == len(got[-1])
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/", take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        text = json.dumps({"a": "\U0001f600"})
        async with aiohttp.ClientSession(middlewares=(readable_as_yaml,)) as session:
            for kind in (APPLY, "application/merge-patch+json"):
                url = f"http://127.0.0.1:{port}/"
                async with session.patch(url, data=text, headers={"Content-Type": kind}) as answer:
                    assert answer.status == 200
            async with session.get(url) as answer:
                assert answer.status == 200
    finally:
        await runner.cleanup()
    assert got == ['{"a": "\U0001f600"}'.encode(), text.encode(), b""]
