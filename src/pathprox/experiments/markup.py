"""Building blocks of a web page that is one file: no script, nothing fetched, readable on a phone and in the dark."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_KINDS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}

DOTS, SCREEN = 150, 96
"""Dots per inch of our pictures, and of a page: so they are shown as large as they were drawn."""

_STYLE = """
:root { color-scheme: light dark; --text: #1d2330; --quiet: #5b6475; --page: #ffffff; --card: #f5f7fa;
        --line: #d7dce5; --accent: #1f5f99; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ef; --quiet: #a2acbd; --page: #14181f; --card: #1d232d; --line: #38414f; --accent: #8fc1ee; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--text);
       font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .6rem; }
section { border-top: 1px solid var(--line); padding: 1.6rem 0 .6rem; }
a { color: var(--accent); }
nav ul { columns: 16rem; padding-left: 1.2rem; margin: 0 0 1.6rem; }
p, li { max-width: 72ch; }
ul { padding-left: 1.2rem; }
.quiet { color: var(--quiet); font-size: .9rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .38rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { background: var(--card); font-weight: 600; }
tr:last-child td { border-bottom: 0; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .85em;
            background: var(--card); border-radius: .3rem; }
code { padding: .1em .3em; }
pre { padding: .7rem .9rem; overflow-x: auto; border: 1px solid var(--line); }
pre code { padding: 0; font-size: 1em; background: none; }
.picture { overflow-x: auto; margin: .6rem 0; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
@media (max-width: 45rem) { img { max-width: none; } .picture img { width: auto; height: 17rem; } }
""".strip()


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    body: str
    """Ready HTML: whoever makes it escapes what it did not write itself, for instance with `paragraph`."""
    command: str = ""
    """What was run to make it, a line each; shown as it is."""


def document(title: str, sections: Sequence[Section]) -> str:
    """A whole page, with a list of its sections on top where there are several."""
    anchors = [f"part{i}" for i in range(1, len(sections) + 1)]
    links = "".join(
        f'<li><a href="#{anchor}">{escape(s.title)}</a></li>' for anchor, s in zip(anchors, sections, strict=True)
    )
    parts = [_section(anchor, section) for anchor, section in zip(anchors, sections, strict=True)]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            *([f"<nav><ul>{links}</ul></nav>"] if len(sections) > 1 else []),
            *parts,
            "</body>",
            "</html>\n",
        ]
    )


def _section(anchor: str, section: Section) -> str:
    command = f"\n<pre><code>{escape(section.command)}</code></pre>" if section.command else ""
    return f'<section id="{anchor}">\n<h2>{escape(section.title)}</h2>\n{section.body}{command}\n</section>'


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls inside its own frame where the screen is narrower."""
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    # the frame can be focused so that it can be scrolled by keyboard
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table></div>"
    )


def image(source: Path | bytes, alt: str) -> str:
    """A picture that travels within the page; ``alt`` says what it shows to those who do not see it."""
    content = source if isinstance(source, bytes) else source.read_bytes()
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        raise ValueError(f"{'the bytes' if isinstance(source, bytes) else source} are no PNG, JPEG or GIF picture.")
    data = base64.b64encode(content).decode()
    size = f' width="{round(int.from_bytes(content[16:20], "big") * SCREEN / DOTS)}"' if kind == "image/png" else ""
    # on a narrow screen it scrolls inside its own frame, like a table, where all of it would be too small to read
    return f'<div class="picture" tabindex="0"><img src="data:{kind};base64,{data}"{size} alt="{escape(alt)}"></div>'


def paragraph(text: str, quiet: bool = False) -> str:
    start = '<p class="quiet">' if quiet else "<p>"
    return f"{start}{inline(text)}</p>" if text else ""


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{inline(line)}</li>' for line in lines)}</ul>" if lines else ""


def inline(text: str) -> str:
    """Escaped, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
