"""Starts the Chromium browser in which tests open HTML pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium, and yield it as a Playwright browser.

    The browser is the first of these programs that is installed: chromium-headless-shell, chromium, Playwright's own
    build. Playwright's event loop runs in this thread, so an asyncio test cannot use this browser.
    """
    system = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=system, args=ARGUMENTS)
        except Error as error:
            pytest.fail(
                f"These tests need Chromium: sudo apt-get install chromium, or playwright install chromium. ({error})"
            )
        yield browser
        browser.close()
