"""What mkdocs does beside its own for docs/ (``hooks`` in mkdocs.yml; `make docs`).

Pages link to files of the repository as one reads them in a checkout (``../examples/demo``). Each such file becomes
part of the site, below ``repository/``, and each such folder a list of its files, so the site needs no other host. A
link to something that is not there stays as it is, and mkdocs reports it. Also reported, which ends a strict build:
Markdown that was not understood, and a page that would load something from another host.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

BELOW = "repository"
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#:]+)(?P<after>(#[^)\s]*)?\))")
_FENCE = re.compile(r"^ *(?:\d+\. |- )?```.*?^ *```", re.MULTILINE | re.DOTALL)
_NOT_UNDERSTOOD = re.compile(
    r"<p>(?:[^<]|<(?!/p>))*?(?:```|\n(?:[-*]|\d+\.) )|<code>(?:sh|bash|console|yaml|json|python|text)\n"
)
_FOREIGN = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//", re.IGNORECASE)
_HIDDEN = frozenset({"__pycache__"})
_log = logging.getLogger("mkdocs.hooks.moontide")


def links(text: str) -> Iterator[str]:
    """Relative targets of the links of a page, without anchors; not those in blocks of code."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        yield match["target"]


def address(path: str, root: Path) -> str:
    """Where the site has the file or folder ``path`` of the repository."""
    if path.startswith("docs/") and (root / path).is_file():
        return path.removeprefix("docs/")
    return f"{BELOW}/{path}/index.md" if (root / path).is_dir() else f"{BELOW}/{path}"


def listing(folder: Path) -> str:
    """A page that names the files of a folder."""
    names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
    return f"# {folder.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def wanted(root: Path, more: Iterable[str] = ()) -> dict[str, str | None]:
    """Paths outside docs/ that its pages lead to, ``more``, and what these pages lead to; for a folder, the page that
    lists it."""
    found: dict[str, str | None] = dict.fromkeys(name for name in more if (root / name).is_file())
    todo = [each.relative_to(root).as_posix() for each in sorted((root / "docs").rglob("*.md"))] + list(found)
    while todo:
        page = todo.pop()
        text = found.get(page) or (root / page).read_text()
        folder = page if (root / page).is_dir() else posixpath.dirname(page)
        for target in links(text):
            path = posixpath.normpath(posixpath.join(folder, target))
            if path.startswith("..") or path in found or _HIDDEN & set(path.split("/")):
                continue
            inside = path.startswith("docs/") and (root / path).is_file()
            if inside or not (root / path).exists():
                continue
            found[path] = listing(root / path) if (root / path).is_dir() else None
            if found[path] or path.endswith(".md"):
                todo.append(path)
    return found


def rewritten(text: str, page: str, at: str, root: Path) -> str:
    """``text`` of the file or folder ``page`` of the repository, with links that hold at ``at`` in the site."""
    folder = page if (root / page).is_dir() else posixpath.dirname(page)

    def changed(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["target"]))
        if path.startswith("..") or not (root / path).exists():
            return match[0]
        target = posixpath.relpath(address(path, root), posixpath.dirname(at) or ".")
        return f"{match['before']}{target}{match['after']}"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(changed, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(changed, text[end:])])


def _root(config: Any) -> Path:
    return Path(config.config_file_path).resolve().parent


def on_files(files: Files, config: Any) -> Files:
    """Add what pages lead to outside docs/."""
    root = _root(config)
    in_nav = re.findall(rf"\b{BELOW}/([^'\"]+\.md)", str(config.nav))
    for path, text in wanted(root, in_nav).items():
        at = address(path, root)
        inclusion = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
        if text is None:
            made = File.generated(config, at, abs_src_path=str(root / path), inclusion=inclusion)
        else:
            made = File.generated(config, at, content=text, inclusion=inclusion)
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make its links those of the site."""
    at = page.file.src_uri
    path = at.removeprefix(f"{BELOW}/").removesuffix("/index.md") if at.startswith(f"{BELOW}/") else f"docs/{at}"
    return rewritten(markdown, path, at, _root(config))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> None:
    """Report lists and blocks of code that became text: mkdocs wants an empty line before, and four spaces within."""
    if (found := _NOT_UNDERSTOOD.search(html)) is not None:
        _log.warning("%s: not understood as a list or as code: %s", page.file.src_uri, found[0][-80:])


def on_post_page(output: str, page: Any, config: Any) -> None:
    """Report what a reader's browser would get from elsewhere."""
    if (found := _FOREIGN.search(output)) is not None:
        _log.warning("%s: loads from another host: %s", page.file.src_uri, found[0])
