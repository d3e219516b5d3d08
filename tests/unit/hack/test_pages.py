"""The site of docs/: links to files of the repository lead somewhere in it, and others stay for mkdocs to report."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.pages import hook

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "a.yaml").write_text("a: 1\n")
    (tmp_path / "examples" / ".hidden").write_text("")
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "README.md").write_text("[page](../docs/page.md#top) [code](code.py)\n")
    (tmp_path / "plugin" / "code.py").write_text("")
    (tmp_path / "docs" / "page.md").write_text(
        "[x](../examples) [y](../plugin/README.md#a) [z](decisions/one.md) [gone](../gone.md) [out](../../etc)\n"
        "```\n[code](../secret.txt)\n```\n"
    )
    (tmp_path / "docs" / "decisions" / "one.md").write_text("[x](../page.md)\n")
    (tmp_path / "secret.txt").write_text("")
    return tmp_path


def test_what_pages_lead_to_is_part_of_the_site_and_nothing_else(checkout: Path) -> None:
    assert hook.wanted(checkout) == {
        "examples": "# examples\n\n- [a.yaml](a.yaml)\n",
        "examples/a.yaml": None,
        "plugin/README.md": None,
        "plugin/code.py": None,
    }
    assert "secret.txt" in hook.wanted(checkout, ["secret.txt"])


def test_links_hold_in_the_site(checkout: Path) -> None:
    text = hook.rewritten((checkout / "docs" / "page.md").read_text(), "docs/page.md", "page.md", checkout)
    assert "[x](repository/examples/index.md) [y](repository/plugin/README.md#a) [z](decisions/one.md)" in text
    assert "[gone](../gone.md) [out](../../etc)" in text
    assert "[code](../secret.txt)" in text
    readme = (checkout / "plugin" / "README.md").read_text()
    made = hook.rewritten(readme, "plugin/README.md", "repository/plugin/README.md", checkout)
    assert made == "[page](../../page.md#top) [code](code.py)\n"


@pytest.mark.parametrize(
    ("html", "bad"),
    [
        ("<p>Not taken.\n- one</p>", True),
        ("<p>```sh\nhelm</p>", True),
        ("<li><code>sh\nhelm</code></li>", True),
        ("<p>one</p>\n<ul>\n<li>- two</li></ul>", False),
        ("<p>see <code>make\ntest</code></p>", False),
    ],
)
def test_markdown_that_was_not_understood_is_seen(html: str, bad: bool) -> None:
    assert (hook._NOT_UNDERSTOOD.search(html) is not None) is bad


@pytest.mark.parametrize(
    ("html", "bad"),
    [
        ('<script src="https://x.test/a.js"></script>', True),
        ('<link rel=stylesheet href="//x.test/a.css">', True),
        ('<a href="https://x.test/">x</a><script src="assets/a.js"></script>', False),
    ],
)
def test_what_comes_from_another_host_is_seen(html: str, bad: bool) -> None:
    assert (hook._FOREIGN.search(html) is not None) is bad


def test_links_of_pages_that_are_not_in_the_site() -> None:
    pages = [path for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") if (path := ROOT / name).is_file()]
    dead = [f"{page.name}: {target}" for page in pages for target in hook.links(page.read_text())
            if not (page.parent / target).exists()]  # fmt: skip
    assert pages
    assert dead == []
