"""Draw the page that `run.py` writes, with a headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# No window, no network, no user profile.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--window-size=1280,1480")  # fmt: skip


def main() -> None:
    """Write `page.png` from `gpt2.html`."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("No Chromium found: install Debian's package chromium.")
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *FLAGS, f"--user-data-dir={profile}",
                   f"--screenshot={HERE / 'page.png'}", (HERE / "gpt2.html").as_uri()]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
    print(f"wrote {HERE / 'page.png'}")


if __name__ == "__main__":
    main()
