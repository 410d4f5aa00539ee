"""The Chromium in which pages are looked at."""

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
    """The system's Chromium, the lightest build that is there, else Playwright's own. While it is there, Playwright's
    event loop runs in this thread, and a test that is a coroutine could not."""
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
