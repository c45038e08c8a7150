"""A process that ends itself at a chosen point: what `kill -9`, a full quota or Slurm does, by
count, not by luck.

`python injector.py -m branchgrpo.cli train …`, or `-c code …`, runs a command with a fault,
BRANCHGRPO_FAULT, as JSON:

- `at`: a function or method, "module:name", and `call`: which call of it (from 1; default 1); or
- `event`: an operation on files ("open" for writing, "os.rename", "os.remove", "os.mkdir",
  "os.rmdir", …), `path`: of
  which file, relative to `folder` (a pattern), and `call`;
- `when`: "before" or "after" it, or "gradient": as soon as the backward pass reaches what it
  returned;
- `inside`: only calls within another one, ["module:name", which call];
- `signal`: KILL, TERM, USR2; or `limit`: files may have no more bytes from there on, so that the
  kernel ends the
  process (SIGXFSZ) in the middle of the write that comes next;
- `rank`: which process of several (default 0), or "all";
- `record`: instead of all this, write every operation on files within `folder` to this file.
"""

import builtins
import fnmatch
import importlib
import io
import json
import os
import re
import resource
import runpy
import signal
import sys
import traceback
from functools import wraps

REACHED = "fault reached: "  # begins the line that a process writes before it ends itself
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FILES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
FUNCTIONS = ("open", "rename", "replace", "remove", "unlink", "mkdir", "rmdir", "truncate")


def owner_of(name):
    "Return the object that holds `module:name`, and the attribute."
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    return owner, last


def replace(name, wrapper):
    "Replace a method in its class, a function wherever a module of branchgrpo has imported it."
    owner, last = owner_of(name)
    old = getattr(owner, last)
    new = wraps(old)(wrapper(old))
    places = [
        module for key, module in list(sys.modules.items()) if key.split(".")[0] == "branchgrpo"
    ]
    for place in [owner] if isinstance(owner, type) else [owner, *places]:
        for key, value in list(vars(place).items()):
            if value is old or (place is owner and key == last):
                setattr(place, key, new)
    if last not in vars(owner):
        setattr(owner, last, new)


class Fault:
    "Counts calls, and ends the process at the one that is asked for."

    def __init__(self, table):
        self.table = table
        self.left = table.get("call", 1)
        self.active = "inside" not in table

    def counted(self):
        "Count a call; return whether it is the one."
        if not self.active:
            return False
        self.left -= 1
        return self.left == 0

    def strike(self):
        "End the process, or let the kernel do so in the next write that is too long."
        os.write(2, f"{REACHED}{json.dumps(self.table)}\n".encode())
        if "limit" in self.table:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.table["limit"], self.table["limit"]))
        else:
            os.kill(os.getpid(), getattr(signal, "SIG" + self.table.get("signal", "KILL")))


def watch_inside(fault, name, number):
    "Let a fault count only within the `number`-th call of a function."
    calls = iter(range(1, 10**9))

    def wrapper(old):
        def watched(*args, **options):
            fault.active = next(calls) == number
            try:
                return old(*args, **options)
            finally:
                fault.active = False

        return watched

    replace(name, wrapper)


def first_tensor(value):
    "Return the first tensor with a gradient within a value."
    if isinstance(value, (tuple, list)):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return value if getattr(value, "requires_grad", False) else None


def watch_calls(fault, name, when):
    "Strike at a call of a function."

    def wrapper(old):
        def watched(*args, **options):
            here = fault.counted()
            if here and when == "before":
                fault.strike()
            value = old(*args, **options)
            if here and when == "after":
                fault.strike()
            if here and when == "gradient":
                first_tensor(value).register_hook(lambda gradient: fault.strike())
            return value

        return watched

    replace(name, wrapper)


def place_of(path, folder_file=None):
    "Return a path of an operation as an absolute one."
    path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if isinstance(folder_file, int) and folder_file >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder_file}"), path)
    return os.path.abspath(path) if path else ""


def operation(event, args):
    "Return the path that an event changes; None if it changes none."
    if event == "open":
        path, mode, flags = args
        writes = (
            any(letter in mode for letter in "wax+")
            if isinstance(mode, str)
            else (flags or 0) & CHANGES
        )
        return place_of(path) if writes and not isinstance(path, int) else None
    if event in FILES:
        return place_of(
            args[0],
            {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}.get(event) and args[-1],
        )
    return None


def changes(event, path):
    """Return whether an operation changes anything: what exists is not made, what is missing is not
    moved."""
    return event == "open" or os.path.lexists(path) != (event == "os.mkdir")


def plain(path):
    """Return a path without what differs between two runs: numbers of processes, times, random
    names."""
    return re.sub(rf"\b{os.getpid()}\b|\b[0-9a-f]{{8}}\b|\d{{8,}}", "N", path)


class Files:
    "Sees every operation on the files of a folder, by Python's audit events."

    def __init__(self, table, fault):
        self.folder, self.table, self.fault = table["folder"], table, fault
        self.record = (
            os.open(table["record"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if "record" in table
            else None
        )
        self.armed = False  # the operation has begun, and the fault comes after it
        self.busy = False
        sys.addaudithook(self.seen)

    def seen(self, event, args):
        if self.busy or (event != "open" and event not in FILES):
            return
        self.busy = True
        try:
            path = operation(event, args)
            if path and path.startswith(self.folder) and changes(event, path):
                self.handle(event, plain(os.path.relpath(path, self.folder)))
        finally:
            self.busy = False

    def handle(self, event, path):
        if self.record is not None:
            os.write(self.record, (json.dumps([event, path]) + "\n").encode())
        elif (
            event == self.table["event"]
            and fnmatch.fnmatch(path, self.table["path"])
            and self.fault.counted()
        ):
            if self.table.get("when", "before") == "before":
                self.fault.strike()
            self.armed = True

    def after(self, old):
        "Return a function that strikes after the operation that has armed the fault."

        @wraps(old)
        def watched(*args, **options):
            value = old(*args, **options)
            if self.armed:
                self.fault.strike()
            return value

        return watched


def install(table):
    "Prepare a fault in this process."
    fault = Fault(table)
    if table.get("rank", 0) not in ("all", int(os.environ.get("RANK", 0))):
        return
    if "inside" in table:
        watch_inside(fault, *table["inside"])
    if "at" in table:
        watch_calls(fault, table["at"], table.get("when", "before"))
    if "event" in table or "record" in table:
        files = Files(table, fault)
        if table.get("when") == "after":
            for name in FUNCTIONS:
                setattr(os, name, files.after(getattr(os, name)))
            builtins.open = io.open = files.after(builtins.open)


def main():
    "Run a command with the fault of the environment; end without waiting for gloo's threads."
    importlib.import_module("branchgrpo.training.trainer")
    install(json.loads(os.environ.get("BRANCHGRPO_FAULT", "{}")))
    kind, what = sys.argv[1:3]
    code, sys.argv = 0, sys.argv[2:]
    try:
        if kind == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
