"""Opens the built documentation in headless Chromium: `python tests/browse_docs.py build/docs`.

Needs Chromium with its driver, and the package selenium. Every page has to open without an error in
the console, all of its pictures have to be there, no page may be wider than a phone, and the search
has to find `apply_rotary`. (Sphinx checks links.)
"""

import argparse
import contextlib
import functools
import http.server
import pathlib
import shutil
import sys
import tempfile
import threading

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
SEARCHED, FOUND = "apply_rotary", "reference/rotary.html"
SECONDS = 30

PICTURES = """
const pictures = [...document.querySelectorAll('article img')];
pictures.forEach(picture => picture.loading = 'eager');
return Promise.all(pictures.map(p => p.decode().then(() => null, () => p.src))).then(broken => [pictures.length, broken.filter(src => src)])
"""
WIDTHS = "return [document.documentElement.scrollWidth, window.innerWidth]"
RESULTS = "return [...document.querySelectorAll('ul.search li a')].map(a => a.href)"


def browse(docs: pathlib.Path) -> list[str]:
    """What is wrong with the pages in a folder: a line each."""
    with _server(docs) as address, _browser() as driver:
        pages = sorted(
            path.relative_to(docs).as_posix()
            for path in docs.rglob("*.html")
            if "_static" not in path.parts
        )
        faults, pictures = [], 0
        for page in pages:
            driver.get(f"{address}/{page}")
            count, broken = driver.execute_script(PICTURES)
            pictures += count
            faults += [f"{page}: {source} does not load" for source in broken]
            faults += [
                f"{page}: {entry['message']}"
                for entry in driver.get_log("browser")
                if entry["level"] == "SEVERE"
            ]
        faults += _too_wide(driver, address, pages)
        faults += _unfound(driver, address)
    print(f"{len(pages)} pages, {pictures} pictures, {len(faults)} faults")
    return faults


def _too_wide(driver, address: str, pages: list[str]) -> list[str]:
    """Pages that have to be pushed sideways on a phone."""
    faults = []
    # Headless Chromium has a least window width.
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    for page in pages:
        driver.get(f"{address}/{page}")
        wide, window = driver.execute_script(WIDTHS)
        if wide > window:
            faults.append(f"{page}: {wide} pixels wide on a phone of {window}")
    return faults


def _unfound(driver, address: str) -> list[str]:
    """Whether the search finds a function on the page that describes it."""
    from selenium.webdriver.support.ui import WebDriverWait  # noqa: PLC0415

    driver.get(f"{address}/search.html?q={SEARCHED}")
    results = WebDriverWait(driver, SECONDS).until(lambda driver: driver.execute_script(RESULTS))
    is_found = any(FOUND in result for result in results)
    return [] if is_found else [f"search: {SEARCHED} is not found on {FOUND}"]


@contextlib.contextmanager
def _server(folder: pathlib.Path):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def _browser():
    from selenium import webdriver  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    options.binary_location = chromium()
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, service)
        driver.set_script_timeout(SECONDS)
        try:
            yield driver
        finally:
            driver.quit()


def chromium() -> str | None:
    """The path of Chromium where it and its driver are installed."""
    return shutil.which("chromedriver") and (
        shutil.which("chromium") or shutil.which("google-chrome")
    )


def main() -> int:
    """Prints what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("docs", type=pathlib.Path, help="folder of the built pages")
    docs = parser.parse_args().docs
    if not chromium():
        parser.error(
            "wanted Chromium and its driver on the path; on Debian: apt-get install chromium chromium-driver"
        )
    if not (docs / "index.html").exists():
        parser.error(
            f"{docs}: wanted built pages; run: python -m sphinx -W --keep-going notebooks {docs}"
        )
    faults = browse(docs)
    print(*faults, sep="\n", end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
