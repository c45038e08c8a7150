"""What only a browser shows: `make browser`, on a machine with Chromium. Not part of `make test`.

1. The explorer's page: a hundred plans changed by hand, its numbers against `branchgrpo.plan`.
2. The site: its search finds a lesson.
3. Screenshots of its first pages and of a run's page, narrow and wide, light and dark: to be looked
   at.
4. JupyterLab: the explorer's notebook is run in it, and a plan is changed by hand there.
"""

import argparse
import functools
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from branchgrpo.plan import RolloutPlan, plan_cost
from branchgrpo.site.explorer import explorer_page

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PAGES = [
    "nbs/index.html",
    "nbs/00_tour.html",
    "docs/explorer.html",
    "nbs/24_gallery.html",
    "figures/README.html",
]
SIZES = {"narrow": (390, 844), "wide": (1400, 900)}
ROOT = Path(__file__).parents[1]
# of the JupyterLab that is started: nobody else on this machine may use it
TOKEN = secrets.token_hex(16)
GRID = "#grid [data-row][data-step]"


def choose(page, draw, selector):
    "Return one of the elements that can be seen and used; None if there is none."
    usable = "all => all.flatMap((e, n) => e.offsetParent && !e.disabled ? [n] : [])"
    places = page.locator(selector).evaluate_all(usable)
    return page.locator(selector).nth(draw.choice(places)) if places else None


def random_change(page, draw):
    """Do what a hand does: press a cell of the grid, move a slider, type a number, choose from a
    list, tick a box."""
    kind = draw.choice(("cell", "cell", "cell", "range", "number", "select", "checkbox", "fan"))
    selector = {
        "cell": GRID,
        "select": "#controls select",
        "fan": "#step input[type=text]",
    }.get(kind, f"#controls input[type={kind}]")
    field = choose(page, draw, selector)
    if field is None:
        return
    if kind in ("cell", "checkbox"):
        field.click()
    elif kind == "select":
        values = field.locator("option").evaluate_all("all => all.map(e => e.value)")
        field.select_option(draw.choice(values))
    elif kind == "fan":  # children of each node: as many numbers as nodes, or a line says why not
        nodes = page.evaluate("() => shown.plan.populations[chosen]")
        field.fill(", ".join(str(draw.randint(1, 3)) for _ in range(nodes)))
        field.press("Enter")
    elif kind == "range":
        field.focus()
        for _ in range(draw.randint(1, 4)):
            page.keyboard.press(draw.choice(("ArrowLeft", "ArrowRight")))
    else:
        field.fill(str(draw.randint(1, 6)))


def shown_counts(page):
    "Return the numbers of the tiles by name."
    texts = (
        "all => all.map(e => [e.querySelector('span').textContent,"
        " e.querySelector('b').textContent])"
    )
    found = {
        name: float(value.replace(",", ""))
        for name, value in page.locator("#tiles .tile").evaluate_all(texts)
    }
    of = next(name for name in found if name.startswith("of "))
    return found | {
        "edges": float(re.search(r"[\d,]+", of)[0].replace(",", "")),
        "trained edges": found[of],
    }


def shown_plan(page):
    "Return the plan that the page offers as code."
    line = next(
        line
        for line in page.locator("#python").inner_text().splitlines()
        if line.startswith("plan = ")
    )
    return eval(line.removeprefix("plan = "), {"RolloutPlan": RolloutPlan})


def compare(page):
    """Compare what is shown with what the library counts; return whether the gradient is pruned,
    too."""
    found, plan = shown_counts(page), shown_plan(page)
    option = page.evaluate("() => ({...state})")
    reference = bool(option["reference"])
    cost = plan_cost(plan, reference=reference)
    assert found["images"] == cost.leaves == plan.leaves, (found, plan)
    assert found["rollout calls"] == cost.calls, (found, cost, plan)
    drawn = page.locator("#tree path.edge").evaluate_all(
        "paths => paths.map(p => (p.getAttribute('d').match(/M/g) || []).length)"
    )
    if drawn:
        assert sum(drawn) == found["edges"], (sum(drawn), found, plan)
    pruned = (
        option["prune"] != "none"
        or option["group_selection"] != "all"
        or option["train_fraction"] < 1
    )
    # which nodes are left decides how many edges lead to them: the library's number is the most
    uneven = plan.splits or plan.fans or option["selection"] == "resample"
    pruned = pruned or bool(plan.prune_at and uneven)
    if pruned:
        assert found["trained calls"] <= cost.trained_calls, (found, cost, plan)
    else:
        assert found["trained calls"] == cost.trained_calls, (found, cost, plan, option)
        assert found["cost"] == round(cost.flops), (found, cost, plan)
    return pruned


def check_explorer(browser, folder, plans=100):
    "Change plans by hand in the explorer's own page."
    file = folder / "explore.html"
    file.write_text(explorer_page(), encoding="utf-8")
    page, draw, errors = browser.new_page(), random.Random(0), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    recipes = [option.get_attribute("value") for option in page.locator("#recipe option").all()]
    seen, pruned, refused = set(), 0, 0
    while len(seen) < plans:
        page.locator("#recipe").select_option(draw.choice(recipes))
        for _ in range(draw.randint(1, 4)):
            random_change(page, draw)
            refused += page.locator("#refusal").is_visible()
            state = page.evaluate("() => JSON.stringify(state)")
            if state not in seen:
                pruned += compare(page)
            seen.add(state)
    assert errors == [], errors
    print(
        f"explorer: {len(seen)} plans, of {pruned} the gradient is pruned; {refused} changes"
        " refused; all counts agree"
    )


def check_search(browser, address):
    "The site's search finds the lesson on reward fusion."
    page = browser.new_page()
    page.goto(f"{address}/search.html?q=fusion")
    page.locator("#search-results li a", has_text="Reward fusion").first.wait_for(timeout=60_000)
    print(f"search: {page.locator('#search-results li').count()} pages tell of fusion")


def photograph(browser, address, pages, out):
    """Take a screenshot of each page, narrow and wide, light and dark; complain about what is wider
    than the window."""
    for size, (width, height) in SIZES.items():
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            for name in pages:
                page.goto(f"{address}/{name}")
                page.wait_for_timeout(1500)
                wide = page.evaluate("document.documentElement.scrollWidth") - width
                if wide > 0:
                    print(f"{name}, {size}: {wide} pixels wider than the window")
                page.screenshot(path=out / f"{Path(name).stem}-{size}-{theme}.png")
            page.close()


def served(folder):
    "Serve a folder on this machine; return its address."

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


@contextmanager
def jupyter_lab():
    """Run JupyterLab on a copy of the explorer's notebook, with settings of its own; yield its
    address."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            f"--port={port}",
        ]
        words += [
            f"--ServerApp.root_dir={folder}",
            f"--IdentityProvider.token={TOKEN}",
            "--LabApp.news_url=",
        ]
        own = {
            "JUPYTERLAB_SETTINGS_DIR": folder,
            "JUPYTERLAB_WORKSPACES_DIR": folder,
            "JUPYTER_RUNTIME_DIR": folder,
        }
        shutil.copy(ROOT / "nbs/site/01_explorer.ipynb", folder)
        with open(Path(folder) / "log", "w") as log:
            server = subprocess.Popen(words, env=os.environ | own, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def check_lab(browser, out):
    "Run the explorer's notebook in JupyterLab, and change a plan in the frame that its cell shows."
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    with jupyter_lab() as address:
        for _ in range(60):
            with suppress(PlaywrightError):
                page.goto(f"{address}/lab/tree/01_explorer.ipynb?reset&token={TOKEN}")
                break
            page.wait_for_timeout(1000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=120_000)
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
        page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
        frame = page.frame_locator("iframe[title='The explorer']")
        frame.locator("#tiles .tile").first.wait_for(timeout=300_000)
        before = frame.locator("#tiles").inner_text()
        frame.locator(GRID).nth(4).click()
        after = frame.locator("#tiles").inner_text()
        assert after != before, "a plan changed by hand changes its counts"
        frame.locator("#tiles").scroll_into_view_if_needed()
        page.screenshot(path=out / "jupyterlab.png")
        page.close()
    print("JupyterLab: the explorer's cell is run, and answers a hand")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", default="_site", help="a built site (make site)")
    parser.add_argument("--out", default="build/browser", help="where screenshots go")
    parser.add_argument(
        "--pages", nargs="*", default=PAGES, help="pages of the site, or other pages in its folder"
    )
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--only", choices=("explorer", "site", "lab"))
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("browser: neither chromium nor google-chrome is installed")
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        if given.only in (None, "explorer"):
            check_explorer(browser, out, given.plans)
        if given.only in (None, "lab"):
            check_lab(browser, out)
        if given.only in (None, "site"):
            if not Path(given.site, "index.html").exists():
                raise SystemExit(
                    f"browser: {given.site}/index.html is not there; make site builds it"
                )
            address = served(str(Path(given.site).resolve()))
            check_search(browser, address)
            photograph(browser, address, given.pages, out)
            print(f"screenshots: {out}")
        browser.close()


if __name__ == "__main__":
    main()
