"""Compose a notebook from cells of others: compose(out, module, title_md, parts) where a part is (nb alias, index | range | list), ("md", text) or ("code", text)."""
import ast, copy, hashlib, json, re, subprocess, tempfile
from pathlib import Path

class Book:
    def __init__(self, path): self.cells = json.loads(Path(path).read_text())["cells"]

def compose(out, module, title, exports, hides, parts, root="."):
    books = {}
    cells, ids = [], set()
    def new_id(s):
        i = 0
        while True:
            h = hashlib.blake2b(f"{out}{s}{i}".encode(), digest_size=4).hexdigest()
            if h not in ids: return h
            i += 1
    def md(text): return {"cell_type": "markdown", "id": new_id(text), "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}
    def code(text): return {"cell_type": "code", "execution_count": None, "id": new_id(text), "metadata": {}, "outputs": [], "source": text.strip("\n").splitlines(keepends=True)}
    def add(c):
        if c["id"] in ids: c["id"] = new_id("".join(c["source"]))
        ids.add(c["id"]); cells.append(c)
    add(md(title)); add(code(f"#| default_exp {module}")); add(code("#| hide\n" + hides.strip("\n")))
    add(code("#| export\n" + exports.strip("\n")))
    for p in parts:
        if isinstance(p, str): add(md(p)); continue
        kind = p[0]
        if kind == "md": add(md(p[1])); continue
        if kind == "code": add(code(p[1])); continue
        book = books.setdefault(kind, Book(kind))
        idx = p[1]
        for i in ([idx] if isinstance(idx, (int, str)) else idx):
            if isinstance(i, str):
                found = [x for x in book.cells if x["id"].startswith(i)]
                assert len(found) == 1, (kind, i, len(found))
                c = copy.deepcopy(found[0])
            else:
                c = copy.deepcopy(book.cells[i])
            for old, new in (p[2] if len(p) > 2 else []):
                s = "".join(c["source"]); assert old in s, (kind, i, old)
                c["source"] = s.replace(old, new).splitlines(keepends=True)
            add(c)
    meta = {"cells": cells, "metadata": {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
