"""concat.py OUT.ipynb MODULE IN1.ipynb IN2.ipynb …: a first draft of a merged notebook (imports joined on top, titles one level down).

A draft only: the merged notebook must then be written as one. MODULE as in default_exp. Imports of modules given in --own a,b are dropped."""
import ast, json, re, subprocess, sys, tempfile
from pathlib import Path
args = [a for a in sys.argv[1:] if not a.startswith("--own=")]
own = {m for a in sys.argv[1:] if a.startswith("--own=") for m in a[6:].split(",")}
out, module, ins = Path(args[0]), args[1], [Path(p) for p in args[2:]]
own |= {"branchgrpo." + module}
for p in ins:
    for c in json.loads(p.read_text())["cells"]:
        m = re.search(r"^#\|\s*default_exp\s+([\w.]+)", "".join(c["source"]), re.M)
        if m: own.add("branchgrpo." + m.group(1))

def take_imports(src):
    "(import lines, rest) of a code cell."
    try: tree = ast.parse(src)
    except SyntaxError: return [], src
    lines, found, drop = src.split("\n"), [], set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if "warnings" in src and False: continue
            drop |= set(range(node.lineno - 1, node.end_lineno))
            if isinstance(node, ast.ImportFrom) and node.module in own: continue
            found.append("\n".join(lines[node.lineno - 1: node.end_lineno]))
    return found, "\n".join(l for i, l in enumerate(lines) if i not in drop)

def tidy(imports):
    with tempfile.TemporaryDirectory() as d:
        f = Path(d) / "x.py"; f.write_text("\n".join(dict.fromkeys(imports)) + "\n")
        subprocess.run(["ruff", "check", "-q", "--isolated", "--select", "I", "--line-length", "120", "--config", "lint.isort.known-first-party=['branchgrpo']", "--fix", str(f)])
        subprocess.run(["ruff", "format", "-q", "--isolated", "--line-length", "120", str(f)])
        return f.read_text().strip()

exports, hides, body, first_md = [], [], [], None
meta = None
for k, p in enumerate(ins):
    d = json.loads(p.read_text()); meta = meta or d
    for c in d["cells"]:
        src = "".join(c["source"])
        if c["cell_type"] == "markdown":
            if src.startswith("# ") and first_md is None and k == 0: first_md = c; continue
            if k:
                src = re.sub(r"^(#+) ", r"#\1 ", src, flags=re.M)
                src = re.sub(r"^> ", "", src, flags=re.M)
            c["source"] = src.splitlines(keepends=True); body.append(c); continue
        if re.search(r"^#\|\s*default_exp", src, re.M): continue
        if c["cell_type"] == "code":
            export, hide = bool(re.match(r"\s*#\|\s*export\b", src)), bool(re.match(r"\s*#\|\s*hide\b", src))
            found, rest = take_imports(src)
            (exports if export else hides).extend(found)
            left = [l for l in rest.split("\n") if l.strip() and not l.startswith("#|")]
            if not left: continue
            c["source"] = rest.strip("\n").splitlines(keepends=True)
            c["source"] = re.sub(r"\n{4,}", "\n\n\n", re.sub(r"^(#\|[^\n]*\n)\n+", r"\1", "".join(c["source"]))).splitlines(keepends=True)
        body.append(c)
def cell(src, cid): return {"cell_type": "code", "execution_count": None, "id": cid, "metadata": {}, "outputs": [], "source": src.splitlines(keepends=True)}
import hashlib
h = lambda s: hashlib.blake2b((str(out) + s).encode(), digest_size=4).hexdigest()
cells = [first_md, cell(f"#| default_exp {module}", h("exp")), cell("#| hide\n" + tidy(hides), h("hide")), cell("#| export\n" + tidy(exports), h("imports")), *body]
ids = set()
for c in cells:
    while c["id"] in ids: c["id"] = h(c["id"] + str(len(ids)))
    ids.add(c["id"])
meta["cells"] = cells
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
print(out, len(cells), "cells; own modules:", sorted(own))
