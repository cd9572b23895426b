"""A real Chromium without a window, as Debian packages it; what selenium needs to find it."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Browser:
    """One window. `find` and `wait` take CSS selectors."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, url: str, width: int = 1280, height: int = 860, *, dark: bool = False, scale: float = 1) -> None:
        """The page as one who was never there sees it; what was logged before is forgotten."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        look = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [look]})
        self.driver.get(url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.log("browser"), self.log("performance")
        self.driver.get(url)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        """Of the last that fits, hidden or not, as it stands in the document."""
        return self.run("return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''", selector)

    def wait(self, condition: Any, seconds: float = 300) -> Any:
        """Until `condition()` is true; returns what it gave."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.02).until(lambda _: condition())

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self.driver.get_log(kind)

    def requests(self) -> list[str]:
        """Addresses that were asked since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def missing() -> str | None:
    """What keeps a browser from being started here."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found: make browser-test installs them" if lacking else None


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or pytest.fail("no chromium")
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
