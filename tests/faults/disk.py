"""Scenes: Python code in a process of its own, with a small disk that is full or read-only when the
scene says so.

`Disk()` is a real tmpfs in a mount namespace that no other process sees. Where a process may not
make one, it is a folder, and the limit of a file's size (RLIMIT_FSIZE) stands for a full disk;
`kind` says which of both it was, and so does the note of a test.
"""

import json
import os
import sys
from pathlib import Path

from commands import run

BEGIN = """
import contextlib, ctypes, importlib, io, json, os, resource, sys, traceback, warnings
from pathlib import Path
ROOT = Path(sys.argv[1])
NEW_USER, NEW_MOUNTS, READ_ONLY, REMOUNT, BIND = 0x10000000, 0x20000, 1, 32, 4096
libc = ctypes.CDLL(None, use_errno=True)


def mount(kind, target, flags, options):
    "Mount as mount(8) does; a bind mount is of the folder itself. Raise OSError."
    source = str(target).encode() if flags & BIND else kind
    if libc.mount(source, str(target).encode(), kind, flags, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Disk:
    "A small disk at ROOT/disk, on which nothing but the scene writes."

    def __init__(self, size="64m"):
        self.path, self.kind = ROOT / "disk", "tmpfs"
        self.path.mkdir()
        ids = [f"0 {number} 1" for number in (os.getuid(), os.getgid())]
        try:
            if libc.unshare(NEW_USER | NEW_MOUNTS):
                raise OSError(ctypes.get_errno(), "unshare")
            for name, text in zip(("setgroups", "uid_map", "gid_map"), ("deny", *ids)):
                Path(f"/proc/self/{name}").write_text(text)
            mount(b"tmpfs", self.path, 0, f"size={size}".encode())
        except OSError as error:
            self.kind = f"RLIMIT_FSIZE ({error.strerror})"

    def fill(self, left=0):
        "Leave `left` bytes."
        if self.kind != "tmpfs":
            return resource.setrlimit(resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
        # two fill
        with open(self.path / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(1, free - left))

    def free(self):
        "Give the room back."
        if self.kind != "tmpfs":
            free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, free)
        (self.path / "filler").unlink(missing_ok=True)

    def read_only(self, now=True):
        "Lay a mount over the disk that can only be read, or take it away."
        if self.kind == "tmpfs" and now:
            mount(None, self.path, BIND, None)
            mount(None, self.path, BIND | REMOUNT | READ_ONLY, None)
        elif self.kind == "tmpfs":
            libc.umount2(str(self.path).encode(), 2)  # also while a file is open
        else:  # a user that is not root
            for folder in (self.path, *(p for p in self.path.rglob("*") if p.is_dir())):
                folder.chmod(0o555 if now else 0o755)


def before(place, act, call=1):
    "Let `act()` happen before the `call`-th call of `module:name` or `module:Class.name`."
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []

    def watched(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            act()
        return real(*args, **kwargs)

    setattr(owner, name, watched)


def command(*words):
    "Run a command in this process; return its exit code, standard output and standard error."
    from branchgrpo import cli
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()


def lines(err):
    "Return what was said on standard error, without progress bars and warnings."
    signs = ("branchgrpo: ", "Traceback", "Error")
    return [line for line in err.splitlines() if any(sign in line for sign in signs)]


SMALL = ["--steps", 4, "--splits", "0,1", "--prompts-per-iteration", 2, "--tracker", "none",
         "--evaluation-prompts", 4, "--evaluation-steps", 2, "--checkpoint-every", 1,
         "--lora-rank", 4]


def train(folder, *words, iterations=3):
    "Train a small run; return the exit code and what was said on standard error."
    where = ("--iterations", iterations, "--output", folder)
    code, out, err = command("train", *SMALL, "--evaluate-every", 0, *where, *words)
    return code, lines(err)


def rows(folder, file="metrics.jsonl"):
    "Return the rows of a run without its times."
    times = ("seconds", "seconds_rollout", "seconds_update")
    table = [json.loads(line) for line in (Path(folder) / file).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in times} for row in table]


def weights(folder):
    from branchgrpo.training.checkpoints import newest, read_saved_table
    return read_saved_table(newest(Path(folder)), "weights")


def same(one, two):
    "Whether two runs have the same metrics, evaluations and weights, to the bit."
    import torch
    a, b = weights(one), weights(two)
    files = [name for name in ("metrics.jsonl", "evaluations.jsonl") if (Path(one) / name).exists()]
    same_rows = all(rows(one, name) == rows(two, name) for name in files)
    return same_rows and all(torch.equal(a[k], b[k]) for k in a)


def leftovers(folder):
    "Return the files and folders of unfinished writes."
    found = (path for path in Path(folder).rglob("*") if ".tmp" in path.name)
    return sorted(str(path.relative_to(folder)) for path in found)


def ranks(n, *words):
    "Run `branchgrpo train` in `n` processes together; return exit codes and what they said."
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(n):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n),
                           "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
            sys.stdout = sys.stderr = open(ROOT / f"said{rank}.txt", "w")
            from branchgrpo import cli
            try:
                code = cli.main(["train", *map(str, (*SMALL, *words))])
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes, [lines((ROOT / f"said{rank}.txt").read_text()) for rank in range(n)]


found = {}
warnings.simplefilter("ignore")
"""
END = """
print("\\nFOUND " + json.dumps(found, default=str))
sys.stdout.flush()
os._exit(0)
"""


def scene(code, folder, env=None, timeout=300):
    "Run a scene in a process of its own; return its table `found`."
    Path(folder).mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-c", BEGIN + code + END, folder]
    done = run(
        words, env=os.environ | {"TQDM_DISABLE": "1"} | (env or {}), cwd=folder, timeout=timeout
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert said, done.stdout[-4000:]
    return json.loads(said[-1].removeprefix("FOUND "))
