"""Every page held against the rules of axe-core (WCAG 2.2 and good practice), at three widths, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

PAGES = ("plain", "troubled", "many")
"""Fixtures of pages on disk: what has a `path`."""
WIDTHS = (360, 1024, 1600)


@pytest.mark.parametrize("name", PAGES)
def test_no_rule_of_accessibility_is_broken(name: str, browser: Browser, request: pytest.FixtureRequest) -> None:
    """No finding of axe: contrast, names, landmarks, headings, tables, focus; also with every detail open."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(request.getfixturevalue(name).path.as_uri())
    for width, scheme in _looks():
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.evaluate(
            "(open) => document.querySelectorAll('.fold, .help').forEach((each) => each.open = open)", width == 1024
        )
        found = [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in _violations(page)]
        assert (width, scheme, found) == (width, scheme, [])
    context.close()


def _looks() -> Iterator[tuple[int, Any]]:
    return ((width, scheme) for width in WIDTHS for scheme in ("light", "dark"))


def _violations(page: Any) -> list[dict[str, Any]]:
    return list(Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"])
