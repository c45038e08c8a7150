#!/usr/bin/env python
"""Compare two records: `compare.py A.json B.json [--only GROUP] [--ignore REGEX] [--quiet]`.

Says per item "equal", or the first differing key with both values and the largest absolute difference of its numbers.
Items of the group processes may differ by at most 1e-6 (absolute, or relative to a number above 1): then it says so.
Exit code 1 when something differs, or when an item is missing or failed on one side.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

TOLERANCE = 1e-6
WORDS = ("digest",)  # keys of digests, which say nothing about a difference's size
PICTURES = ("samples", "trees")  # digests of rounded pictures and of texts


def leaves(value, path=()):
    "All values of a nested table, by path."
    if isinstance(value, dict):
        if not value:
            yield path, {}
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        yield (*path, "length"), len(value)
        for n, inner in enumerate(value):
            yield from leaves(inner, (*path, str(n)))
    else:
        yield path, value


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def same(one, two):
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two):
        return True
    return type(one) is type(two) and one == two


ABSENT = "(absent)"


def differences(one, two, ignore):
    "All (path, one, two) at which two items differ."
    a, b = dict(leaves(one)), dict(leaves(two))
    for path in [*a, *(path for path in b if path not in a)]:
        x, y = a.get(path, ABSENT), b.get(path, ABSENT)
        if not same(x, y) and not (ignore and ignore.search("/".join(path))):
            yield path, x, y


def distance(x, y):
    "Absolute difference of two numbers; None if they are none."
    if not is_number(x) or not is_number(y):
        return None
    return abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf


def largest(found):
    sizes = [d for _, x, y in found if (d := distance(x, y)) is not None]
    return max(sizes, default=None)


def told(path, x, y):
    return f"{'/'.join(path)}: {str(x)[:80]} ≠ {str(y)[:80]}"


def weights_apart(places, name):
    "The largest difference of the tensors that two records have kept of an item; None if they are not there."
    import torch

    files = [place / f"{name.replace('/', ' ')}.pt" for place in places]
    if not all(file.exists() for file in files):
        return None
    one, two = (torch.load(file, weights_only=True) for file in files)
    # a checkpoint's parts are compared if they are named alike, else what was exported
    if one.keys() != two.keys():
        one, two = ({k: v for k, v in t.items() if k.startswith("result ")} for t in (one, two))
    if one.keys() != two.keys() or any(one[k].shape != two[k].shape for k in one):
        return math.inf
    return max((float((one[k].double() - two[k].double()).abs().max()) for k in one if one[k].numel()), default=0.0)


def within(path, x, y):
    "Whether a difference of a group-processes item may be rounding. Digests are judged by the tensors themselves."
    if path[-1] in WORDS or path[0] in PICTURES:
        return True
    d = distance(x, y)
    if d is None or (isinstance(x, int) and isinstance(y, int)):
        return False
    return d <= TOLERANCE * max(1.0, abs(x))


def verdict(name, one, two, places, ignore):
    "(state, text) of an item: equal, near or differs."
    for side, item in (("the first", one), ("the second", two)):
        if item is None:
            return "differs", f"missing in {side} record"
        if "failed" in item:
            return "differs", f"failed in {side} record: {item['failed'][:200]}"
    found = list(differences(one, two, ignore))
    if not found:
        return "equal", "equal"
    size = largest(found)
    apart = weights_apart(places, name) if name.startswith("processes/") else None
    note = "" if size is None else f"; largest difference of a number {size:.3g}"
    note += "" if apart is None else f"; of a weight {apart:.3g}"
    real = found
    if name.startswith("processes/"):
        real = [entry for entry in found if not within(*entry)]
        if not real and apart is not None and apart <= TOLERANCE:
            pictures = sorted({path[0] for path, *_ in found if path[0] in PICTURES})
            also = f" (digests of {', '.join(pictures)} differ)" if pictures else ""
            return "near", f"within {TOLERANCE:g}{note}{also}"
    # a digest says less than a number beside it
    first = next((entry for entry in real if entry[0][-1] not in WORDS), (real or found)[0])
    return "differs", f"DIFFERS in {len(real or found)} values: {told(*first)}{note}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--only", action="append", help="a group")
    parser.add_argument("--ignore", help="leave out values whose path (a/b/c) matches this regular expression")
    parser.add_argument("--quiet", action="store_true", help="do not list what is equal")
    parser.add_argument("--present", action="store_true", help="compare the items that both records hold, and no others")
    o = parser.parse_args()
    one, two = (json.loads(path.read_text())["items"] for path in (o.first, o.second))
    places = [path.resolve().with_suffix(".weights") for path in (o.first, o.second)]
    ignore = re.compile(o.ignore) if o.ignore else None
    counts = {"equal": 0, "near": 0, "differs": 0}
    for name in [*one, *(name for name in two if name not in one)]:
        if o.only and name.partition("/")[0] not in o.only or o.present and not (name in one and name in two):
            continue
        state, text = verdict(name, one.get(name), two.get(name), places, ignore)
        counts[state] += 1
        if state != "equal" or not o.quiet:
            print(f"{name}: {text}")
    print(f"{counts['equal']} equal, {counts['near']} within {TOLERANCE:g}, {counts['differs']} differ")
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
