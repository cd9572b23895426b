"""The README's pictures of the page: starts `aquiline serve`, asks and races in a real Chromium, writes docs/page*.png.

    python runs/page_pictures.py

What they show is what was decoded while they were taken, so let the machine do nothing else. Needs chromium and
chromedriver (`make browser-test` installs them); pngquant, where there is one, makes the files a third as large.
"""

import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # works from a checkout, installed or not

from tests.browser import Browser, browser  # noqa: E402

PORT = 8471
URL = f"http://127.0.0.1:{PORT}"
WAIT = 300.0  # seconds
ASKED = "How do I make a cup of green tea? Answer in a few short steps.", 96  # tokens at most
RACED = "Write a Python function that reverses the words of a sentence, and explain it.", 160
# The largest tree of which two or three tokens were taken.
PICK_TREE = """
const size = ({ tree }) => (tree.accepted.length - 2.5) ** 2 < 1 ? tree.tokens.length : 0;
choose(shown, shown.cycles.reduce((best, cycle, i, all) => (size(cycle) > size(all[best]) ? i : best), 0));
"""


def main() -> None:
    server = subprocess.Popen([sys.executable, "-m", "aquiline", "serve", "--port", str(PORT)], cwd=ROOT)
    try:
        wait_for(URL)
        with browser() as window:
            window.open(URL, 1120, 760)
            begin(window, RACED)  # the first use of everything is slow
            window.open(URL, 1120, 760)
            begin(window, ASKED)
            window.run(PICK_TREE)
            save(window, "page")
            window.open(URL, 1200, 760)
            begin(window, RACED, "#race")
            save(window, "page-race")
            window.open(URL, 390, 760, dark=True)
            begin(window, ASKED)
            save(window, "page-phone")
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str) -> None:
    end = time.monotonic() + WAIT
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
            return
        except OSError:
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.2)


def begin(window: Browser, asked: tuple[str, int], button: str = "#send") -> None:
    """Ask it with colours on, and wait for the end."""
    text, tokens = asked
    window.find("#colours").click()
    window.run(f"document.querySelector('[name=max_tokens]').value = {tokens}")
    window.find("#prompt").send_keys(text)
    window.find(button).click()
    window.wait(lambda: window.text("#send") == "Send", WAIT)
    print(f"{text}: {' · '.join(window.text(part) for part in ('#rate', '#tau', '.verdict'))}")


def save(window: Browser, name: str) -> None:
    window.run("document.activeElement.blur()")
    path = ROOT / "docs" / f"{name}.png"
    path.write_bytes(window.driver.get_screenshot_as_png())
    if pngquant := shutil.which("pngquant"):
        subprocess.run([pngquant, "--force", "--output", path, "160", path], check=True)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
