"""Python commands as processes that start with the libraries already imported: the standard
library's fork server."""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import ModuleType

# beginnings of variables that are read only at a start
FIXED = ("HF_", "TRANSFORMERS_", "DIFFUSERS_", "PYTHON", "LD_")
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.utils.flop_counter", "torch.utils.tensorboard"),
        *("transformers.models.clip.modeling_clip", "transformers.models.t5.modeling_t5"),
        "diffusers.pipelines.flux.pipeline_flux",
        "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
        "diffusers.pipelines.wan.pipeline_wan_i2v",
        *(
            "accelerate",
            "peft",
            "torchmetrics",
            "papermill",
            "matplotlib.pyplot",
            "scipy.stats",
            "ruamel.yaml",
            "sklearn.datasets",
        ),
    ]
)


def fixed_variables(environment):
    "The variables that a running process cannot change any more."
    return {key: value for key, value in environment.items() if key.startswith(FIXED)}


AT_START = dict(os.environ)
START = fixed_variables(AT_START)


def preloaded():
    """Return a context whose processes start with the libraries imported, and with the variables
    of this module's import."""
    now = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(AT_START)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(now)
    return server


class Passed:
    "An open file that a process of the fork server gets as a number of its own."

    def __init__(self, file):
        self.number = file.fileno()

    def __reduce__(self):
        return _number, (reduction.DupFd(self.number),)


def _number(copy):
    return copy.detach()


def _become(words, environment, folder, out, err):
    "Be `python WORDS`, in a session of its own."
    gc.freeze()  # what the fork server has imported is no garbage, and stays shared
    os.setsid()
    # end with the fork server, which ends with the tests
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in ((out, 1), (err, 2)):
        if number is not None:
            os.dup2(number, file)
            os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules["numpy"].random.seed()
    threads = environment.get("OMP_NUM_THREADS", "1")
    sys.modules["torch"].set_num_threads(int(threads) if threads.isdigit() else 1)
    # a command may have processes of its own
    multiprocessing.current_process()._config["daemon"] = False
    try:
        _run(words)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()


def _run(words):
    "Run what `python -m module …`, `python -c code …` or `python script …` runs."
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    code, name, folder = (
        (words[1], "<string>", "")
        if words[0] == "-c"
        else (None, words[0], os.path.dirname(words[0]))
    )
    sys.argv, sys.path[0] = ["-c", *words[2:]] if code is not None else words, folder
    if code is None:
        code, main.__file__ = Path(name).read_bytes(), name
    exec(compile(code, name, "exec"), main.__dict__)


class Command:
    "A process of the fork server, with what `subprocess.Popen` has."

    def __init__(self, process, words):
        self.process, self.args, self.pid = process, words, process.pid

    def poll(self):
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def popen(words, env=None, cwd=None, stdout=None, stderr=None):
    """Start `python …` in a session of its own; variables that are read at a start are set by a
    fresh interpreter."""
    words = [str(word) for word in words]
    env, cwd = dict(os.environ if env is None else env), str(cwd or os.getcwd())
    if fixed_variables(env) != START or os.path.abspath(words[0]) != os.path.abspath(
        sys.executable
    ):
        return subprocess.Popen(
            words, env=env, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=True
        )
    rest = [word for word in words[1:] if not word.startswith("-X")]
    files = [file and Passed(file) for file in (stdout, stderr)]
    process = server.Process(target=_become, args=(rest, env, cwd, *files), daemon=True)
    process.start()
    return Command(process, words)


def run(words, timeout=None, **options):
    """Run a command to its end, as `subprocess.run` does; output and errors are both in `stdout`,
    as text."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = popen(words, stdout=file, stderr=file, **options)
        try:
            code = process.wait(timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        file.seek(0)
        return subprocess.CompletedProcess(words, code, file.read(), "")
