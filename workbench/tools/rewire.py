"""Rewrite imports, dotted strings and notebook links after modules have moved. See REWIRE.md."""
import json, os, re, subprocess, sys
from pathlib import Path

MAP = json.loads(Path(sys.argv[1]).read_text())
ROOT = Path(sys.argv[2] if len(sys.argv) > 2 else ".").resolve()
MODULES, NAMES, MOVED, LINKS = (MAP.get(k, {}) for k in ("modules", "names", "moved", "links"))
NEW_FROM = {new: [o for o in LINKS if LINKS[o] == new] for new in LINKS.values()}
PKG = ROOT / "branchgrpo"
NOTES = []


def is_old(module):
    return module in MODULES or any(k.startswith(module + ":") for k in (*NAMES, *MOVED))


def target(module, name):
    "(new module, new name) of a name of an old module."
    key = f"{module}:{name}"
    return MOVED.get(key, MODULES.get(module, module)), NAMES.get(key, name)


def split_names(text):
    out = []
    for part in text.replace("(", "").replace(")", "").split(","):
        part = part.split("#")[0].strip()
        if part:
            name, _, alias = part.partition(" as ")
            out.append((name.strip(), alias.strip() or None))
    return out


IMPORT = re.compile(r"^([ \t]*)from (branchgrpo(?:\.\w+)*) import (\([^)]*\)|[^\n(#]+?)([ \t]*#[^\n]*)?$", re.M)


def emit(indent, module, names, comment=""):
    parts = [n if a is None or a == n else f"{n} as {a}" for n, a in sorted(set(names), key=lambda t: (t[0], t[1] or ""))]
    line = f"{indent}from {module} import {', '.join(parts)}"
    if len(line) <= 120:
        return line + comment
    body = f",\n{indent}    ".join(parts)
    flat = f"{indent}    {', '.join(parts)},"
    inner = flat if len(flat) <= 120 and False else f"{indent}    {body},"
    return f"{indent}from {module} import ({comment}\n{inner}\n{indent})"


def rewrite_imports(code, own=None, exported=False):
    renames = {}

    def one(m):
        indent, module, names, comment = m.group(1), m.group(2), split_names(m.group(3)), m.group(4) or ""
        groups = {}
        touched = is_old(module)
        for name, alias in names:
            full = f"{module}.{name}"
            if full in MODULES and MODULES[full] != full:  # a module imported by name
                touched = True
                pkg, _, base = MODULES[full].rpartition(".")
                if alias is None and base != name:
                    renames[name] = base
                    NOTES.append(f"module {full} imported by name -> {base}")
                groups.setdefault(pkg, []).append((base, alias))
                continue
            new_module, new_name = target(module, name)
            if (new_module, new_name) != (module, name):
                touched = True
            if new_name != name and alias is None:
                renames[name] = new_name
            if alias == new_name:
                alias = None
            groups.setdefault(new_module, []).append((new_name, alias))
        if not touched:
            return m.group(0)
        lines = []
        for new_module, items in groups.items():
            if own == new_module and exported:
                NOTES.append(f"dropped own import {[i[0] for i in items]}")
                continue
            lines.append(emit(indent, new_module, items, comment))
        return "\n".join(lines) if lines else f"{indent}###DROP###"

    IMPORT.sub(one, code)  # collects the renames
    before = code
    code = outside_imports(code, renames)
    new = IMPORT.sub(one, code)
    new = re.sub(r"^[ \t]*###DROP###\n?", "", new, flags=re.M)
    if new != code:
        new = join_imports(new)
    return new, renames


def outside_imports(code, renames):
    spans = None
    for old, to in renames.items():
        spans = [(m.start(), m.end()) for m in IMPORT.finditer(code)]
        code = rename_token(code, old, f"RW{list(renames).index(old)}WR", spans)
    for k, to in enumerate(renames.values()):
        code = code.replace(f"RW{k}WR", to)
    return code


def join_imports(code):
    "Join imports from one module in a run of import lines."
    out, run = [], []

    def flush():
        seen, order = {}, []
        for indent, module, names, comment in run:
            key = (indent, module, comment)
            if key not in seen:
                seen[key] = []
                order.append(key)
            seen[key] += names
        order.sort(key=lambda k: k[1])
        out.extend(emit(i, m, seen[i, m, c], c) for i, m, c in order)
        run.clear()

    pos, lines = 0, code
    text = code
    while pos < len(text):
        m = IMPORT.match(text, pos)
        if m and (pos == 0 or text[pos - 1] == "\n"):
            run.append((m.group(1), m.group(2), split_names(m.group(3)), m.group(4) or ""))
            pos = m.end() + 1
            continue
        flush()
        end = text.find("\n", pos)
        end = len(text) if end < 0 else end
        out.append(text[pos:end])
        pos = end + 1
    flush()
    joined = "\n".join(out)
    return joined + ("\n" if code.endswith("\n") and not joined.endswith("\n") else "")


def rename_token(code, old, new, spans=()):
    "Rename NAME tokens, not attributes, keywords, strings or comments; names in the braces of f-strings too."
    import io, tokenize
    if old not in code:
        return code
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        NOTES.append(f"not tokenised, {old} -> {new} by hand? {code[:80]!r}")
        return code
    lines, edits, depth = code.splitlines(keepends=True), [], 0
    real = [t for t in tokens if t.type not in (tokenize.NL, tokenize.COMMENT)]
    for k, t in enumerate(real):
        if t.string in "([{" and t.string:
            depth += 1
        elif t.string in ")]}" and t.string:
            depth -= 1
        before = real[k - 1].string if k else ""
        after = real[k + 1].string if k + 1 < len(real) else ""
        if t.type == tokenize.NAME and t.string == old and before != "." and not (depth and after == "=" and before in "(,"):
            edits.append((t.start, t.end, new))
        elif t.type == tokenize.STRING and re.match(r"[rR]?[fF]", t.string) and old in t.string:
            text = re.sub(r"\{[^{}]*\}", lambda m: re.sub(rf"(?<![\w.\"']){re.escape(old)}(?![\w\"'])", new, m.group(0)), t.string)
            edits.append((t.start, t.end, text))
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    for start, end, text in reversed(edits):
        a, b = offsets[start[0] - 1] + start[1], offsets[end[0] - 1] + end[1]
        if any(x <= a < y for x, y in spans):
            continue
        code = code[:a] + text + code[b:]
    return code


DOTTED = re.compile(r"(?<![\w./-])branchgrpo((?:\.[A-Za-z_]\w*)+)(:[A-Za-z_]\w*)?")


def dotted(text):
    def one(m):
        parts = ["branchgrpo", *m.group(1)[1:].split(".")]
        colon = (m.group(2) or "")[1:]
        for n in range(len(parts), 1, -1):
            module, rest = ".".join(parts[:n]), parts[n:]
            if is_old(module):
                name = colon or (rest[0] if rest else "")
                new_module, new_name = target(module, name) if name else (MODULES.get(module, module), "")
                if colon:
                    return new_module + "".join("." + r for r in rest) + ":" + new_name
                return ".".join([new_module, *([new_name] if rest else []), *rest[1:]])
        return m.group(0)
    return DOTTED.sub(one, text)


LINK = re.compile(r"(\]\()([^)\s#]+\.ipynb)((?:#[^)\s]*)?\))")


def relink(text, here):
    def one(m):
        link = m.group(2)
        if "://" in link:
            return m.group(0)
        for base in [here, *NEW_FROM.get(str(here), [])]:
            full = os.path.normpath(os.path.join(os.path.dirname(base), link))
            if full in LINKS:
                return m.group(1) + os.path.relpath(LINKS[full], os.path.dirname(here) or ".") + m.group(3)
            if base != str(here) and not (ROOT / os.path.dirname(here) / link).exists() and (ROOT / full).exists():
                return m.group(1) + os.path.relpath(full, os.path.dirname(here) or ".") + m.group(3)
        return m.group(0)
    text = LINK.sub(one, text)
    for old, new in LINKS.items():
        text = re.sub(rf"(?<![\w/.]){re.escape(old)}", new, text)
    return text


def notebook(path):
    here = str(path.relative_to(ROOT))
    raw = path.read_text(encoding="utf-8")
    d = json.loads(raw)
    own = None
    for c in d["cells"]:
        m = re.search(r"^#\|\s*default_exp\s+([\w.]+)", "".join(c["source"]), re.M)
        if m:
            own = "branchgrpo." + m.group(1)
    renames, changed = {}, False
    renames |= {k.rpartition(":")[2]: new for k, new in NAMES.items() if k.startswith(f"{own}:") and k not in MOVED and own not in MODULES}
    for c in d["cells"]:
        src = "".join(c["source"])
        new = src
        if c["cell_type"] == "code":
            new = outside_imports(new, renames)
            new, found = rewrite_imports(new, own, bool(re.match(r"\s*#\|\s*exports?\b", src)))
            renames |= found
        elif renames:
            for old, to in renames.items():
                new = re.sub(rf"`{re.escape(old)}(?=[`(])", f"`{to}", new)
        new = relink(dotted(new), here)
        if new != src:
            c["source"] = new.splitlines(keepends=True)
            changed = True
    if changed:
        path.write_text(json.dumps(d, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return changed


def plain(path):
    here = str(path.relative_to(ROOT))
    raw = path.read_text(encoding="utf-8")
    new = raw
    if path.suffix == ".py":
        new, _ = rewrite_imports(new)
        if here == "branchgrpo/__init__.py":
            def public(m):
                name, t = m.group(1), m.group(2)
                module, _, attr = t.partition(":")
                nm, nn = target("branchgrpo." + module, attr or name)
                nm = nm.removeprefix("branchgrpo.")
                return f'    "{name}": "{nm}{":" + nn if nn != name else ""}",'
            new = re.sub(r'^    "(\w+)": "([\w.:]+)",', public, new, flags=re.M)
    new = relink(dotted(new), here)
    if new != raw:
        path.write_text(new, encoding="utf-8")
    return new != raw


files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
count = 0
for f in files:
    p = ROOT / f
    if not f or not p.is_file():
        continue
    if f.startswith(("nbs/", "reproduce/")) and f.endswith(".ipynb"):
        count += notebook(p)
    elif f == "branchgrpo/__init__.py" or (f.startswith(("tests/", "examples/", "nbs/", "reproduce/", ".github/")) or "/" not in f) and p.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".jinja", ".in"):
        count += plain(p)
for old, new in MODULES.items():
    p = ROOT / (old.replace(".", "/") + ".py")
    if old != new and old not in MODULES.values() and p.exists():
        os.remove(p)
print(f"{count} files rewritten")
for n in sorted(set(NOTES)):
    print("note:", n)
