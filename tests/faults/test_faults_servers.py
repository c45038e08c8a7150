"""Servers that misbehave: real sockets; a request is bounded in time, an error is one line, a score
is its image's."""

import base64
import io
import itertools
import json
import random
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from commands import popen
from PIL import Image
from test_training import SMALL

from branchgrpo import cli
from branchgrpo.rewards import scorer, servers
from branchgrpo.rewards.addresses import TOKEN
from branchgrpo.rewards.scorer import Scorer, in_background
from branchgrpo.rewards.unified import UnifiedReward
from branchgrpo.training.checkpoint_files import newest
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.stop import REQUEUE
from branchgrpo.training.trainer import Trainer

IMAGE = torch.linspace(0, 1, 3 * 8 * 8).view(1, 3, 8, 8)
LOADED = 30  # seconds that a machine under load may add


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    "Half a second before the second try is long for a test."
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(servers, "LONGEST_WAIT", 0.5)


def chat(text):
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


GOOD = chat("Final Score: 4")


def answer(body=GOOD, status="200 OK", head=""):
    "Return a whole response as bytes."
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def read_request(connection):
    "Return the first line and the body of a request; none at the end of a connection."
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head.lower())
    while length and len(body) < int(length[1]):
        body += connection.recv(1 << 16)
    return head, body


class Server:
    """Answers each POST as `behave(connection, n, body)` does, n counting from 0; other requests
    well."""

    def __init__(self, behave=None, host="127.0.0.1", port=0, context=None):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.behave = behave or (lambda connection, n, body: connection.sendall(answer()))
        self.context, self.count, self.heads, self.connections = context, itertools.count(), [], []
        self.socket = socket.create_server((host, port), family=family)
        self.port = self.socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.where = f"http{'s' if context else ''}://{name}:{self.port}/v1"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection):
        try:
            connection = (
                self.context.wrap_socket(connection, server_side=True)
                if self.context
                else connection
            )
            while request := read_request(connection):
                self.heads.append(request[0])
                if request[0].startswith(b"POST"):
                    self.behave(connection, next(self.count), request[1])
                else:
                    connection.sendall(answer(b"{}"))
        except OSError:
            pass
        finally:
            connection.close()

    @property
    def posts(self):
        return [head for head in self.heads if head.startswith(b"POST")]

    def close(self):
        "Stop, as a process that is killed: nobody listens, and every connection is cut."
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for connection in self.connections:
            with_reset(connection)


def with_reset(connection):
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def serve():
    "Start servers that end with the test."
    servers = []

    def start(behave=None, **options):
        servers.append(Server(behave, **options))
        return servers[-1]

    yield start
    for server in servers:
        with suppress(OSError):
            server.close()


def scored(server, images=IMAGE, timeout=1.0, retries=1, **options):
    "Return the client, the scores of one call, and its seconds."
    client = UnifiedReward(server.where, timeout=timeout, retries=retries, **options)
    start = time.monotonic()
    scores = client(images, ["a prompt"] * len(images))
    return client, scores, time.monotonic() - start


def trickle(data, every=0.1):
    "Send an answer byte by byte."

    def behave(connection, n, body):
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(every)

    return behave


def sends(data):
    return lambda connection, n, body: connection.sendall(data)


def cuts(data):
    def behave(connection, n, body):
        connection.sendall(data)
        connection.close()

    return behave


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"
UNANSWERED = {
    "takes the request and never answers": (
        lambda connection, n, body: time.sleep(60),
        "ReadTimeout",
    ),
    "sends the body a byte at a time": (
        lambda connection, n, body: (
            connection.sendall(answer()[:40]),
            trickle(answer()[40:])(connection, n, body),
        ),
        "no whole answer within 3 s",
    ),
    "closes in the middle of the body": (cuts(answer()[:-9]), "RemoteProtocolError"),
    "closes without a word": (cuts(b""), "RemoteProtocolError"),
    "says a length that never comes": (
        sends(answer().replace(b"Length: ", b"Length: 9")),
        "ReadTimeout",
    ),
    "sends chunks of garbage": (sends(CHUNKS), "RemoteProtocolError"),
    "does not speak HTTP": (cuts(b"220 mail.example.org ESMTP\r\n"), "RemoteProtocolError"),
    "sends HTML": (sends(answer(b"<html>Welcome to nginx</html>")), "no score in the answer"),
    "sends JSON of another form": (sends(answer(b'{"score": 4}')), "no score in the answer"),
    "says JSON and sends none": (
        sends(answer(b"{", head="Content-Type: application/json\r\n")),
        "no score in the answer",
    ),
    "sends JSON in 500,000 brackets": (sends(answer(b"[" * 500_000)), "no score in the answer"),
    "sends bytes that are no text": (sends(answer(b"\xff\xfe\x00")), "no score in the answer"),
    "scores 7 of 5": (sends(answer(chat("Final Score: 7"))), "no score in the answer"),
    "scores a number instead of a text": (
        sends(answer(b'{"choices": [{"message": {"content": 1e400}}]}')),
        "no score",
    ),
    "fails with 502": (sends(answer(b"oops", "502 Oops")), "status 502"),
    "has too many requests (429)": (sends(answer(b"", "429 Slow down")), "status 429"),
}
FAST = ("sends the body a byte at a time", "sends HTML", "closes in the middle of the body")


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[pytest.mark.fast] if w in FAST else []) for w in UNANSWERED]
)
def test_no_answer_costs_bounded_time_and_gives_no_score(what, serve, noted):
    behave, reason = UNANSWERED[what]
    server = serve(behave)
    client, scores, seconds = scored(server)
    assert scores.isnan().all()
    assert client.last_error.startswith(f"{server.where}: {reason}"), client.last_error
    assert seconds < client.seconds + LOADED
    said = client.last_error.removeprefix(f"{server.where}: ")
    noted(f"a reward server {what}", f"no score: {said}", "no score is made up")


@pytest.mark.fast
def test_a_redirect_is_not_followed(serve, noted):
    "Neither to another server, which would get the images, nor to itself, nor to a file."
    elsewhere = serve()
    for target in (
        f"{elsewhere.where}/chat/completions",
        "/v1/chat/completions",
        "file:///etc/passwd",
    ):
        server = serve(sends(answer(b"", "307 Elsewhere", f"Location: {target}\r\n")))
        with pytest.raises(ValueError, match=r"redirects \(307\), which is not followed") as error:
            scored(server)
        assert len(server.posts) == 1
    assert elsewhere.heads == []
    noted("a reward server redirects", str(error.value), "no byte went on")


REFUSALS = {
    401: TOKEN,
    403: TOKEN,
    404: "no such model",
    400: "no such model",
    422: "no such model",
}


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_stops_at_once(status, serve, noted):
    server = serve(sends(answer(b"no such model", f"{status} No")))
    with pytest.raises(
        ValueError, match=rf"^reward: the server at {server.where} refused a request \({status}"
    ) as error:
        scored(server)
    assert REFUSALS[status] in str(error.value)
    assert len(server.posts) == 1
    noted(
        f"a reward server refuses ({status})",
        str(error.value),
        "nothing is trained without a score",
    )


@pytest.mark.fast
def test_a_server_that_is_not_there_costs_one_line(tmp_path, monkeypatch, capsys, noted):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    code = cli.main(["train", "--reward", f"unified-reward:{where}", "--output", "run"])
    err = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and err.startswith(
        f"branchgrpo: reward: no server answers at {where} (ConnectError"
    )
    assert list(tmp_path.iterdir()) == []
    noted("no reward server is there when a run begins", f"code 2, {err}", "nothing is written")


def test_a_server_that_dies_and_comes_back(serve, monkeypatch, noted):
    """Meanwhile nobody listens, which fails in no time: the tries do not run out before the server
    is back."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.5)
    monkeypatch.setattr(servers, "LONGEST_WAIT", 8.0)
    first = serve(
        lambda connection, n, body: (
            connection.sendall(answer()) if n < 3 else with_reset(connection)
        )
    )
    client = UnifiedReward(first.where, timeout=5.0, in_flight=2)
    waiting = in_background(client, IMAGE.expand(12, -1, -1, -1), ["a"] * 12)
    while len(first.posts) < 5:
        time.sleep(0.01)
    first.close()
    time.sleep(1.5)
    second = serve(port=first.port)
    assert waiting.result(timeout=60 + LOADED).tolist() == [4.0] * 12
    assert len(second.posts) == 9
    noted("a reward server dies in the middle and comes back", "waits for it", "all 12 scores")


def test_a_server_that_has_gone_ends_the_call(serve, noted):
    "However many images there are: the first two wait, all others have no score at once."
    server = serve(lambda connection, n, body: time.sleep(60))
    _, scores, seconds = scored(server, IMAGE.expand(500, -1, -1, -1), in_flight=2)
    assert scores.isnan().all()
    assert seconds < 3 + LOADED
    assert len(server.posts) < 20
    noted(
        "a reward server goes silent before 500 images",
        f"ended after {seconds:.0f} s",
        "no score is made up",
    )


def test_a_pixel_that_is_not_finite_has_no_score(serve):
    "It would be sent as black."
    server = serve()
    images = torch.cat([IMAGE, IMAGE.where(IMAGE > 0.5, torch.nan)])
    assert scored(server, images)[1].isnan().tolist() == [False, True] and len(server.posts) == 1


# images are made while others are scored


def watch(policy, name, first, asked, made):
    """From its call `first` on, a method waits until the server was asked, and only then the server
    may answer."""
    function, calls = getattr(policy, name), itertools.count(1)

    def watched(*args):
        if next(calls) >= first:
            assert asked.wait(60), "nothing is scored while the next images are made"
            made.set()
        return function(*args)

    setattr(policy, name, watched)


# which call waits: an image of an iteration after the first, a prediction after the first 16
# prompts
OVERLAPS = {
    "decode": (2, lambda trainer: trainer.step()["reward"]),
    "predict": (7, lambda trainer: trainer.evaluator(trainer.policy)[0]["eval_reward"]),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", OVERLAPS)
def test_images_are_made_while_a_server_scores_others(serve, tmp_path, name):
    asked, made = threading.Event(), threading.Event()

    def behave(connection, n, body):
        asked.set()
        assert made.wait(60)
        connection.sendall(answer())

    table = SMALL | {
        "output": str(tmp_path),
        "decode_batch": 1 if name == "decode" else None,
        "evaluation_prompts": 32,
    }
    trainer = Trainer(
        TrainConfig.from_dict(table | {"reward": f"unified-reward:{serve(behave).where}"})
    )
    first, run = OVERLAPS[name]
    watch(trainer.policy, name, first, asked, made)
    assert run(trainer) == 4


# a score is a function of its own image


def value_of(body):
    "Return the score of the image in a request: that of its first pixel, exact to 1/255."
    url = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
    return (
        1
        + 4
        * Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).getpixel((0, 0))[0]
        / 255
    )


def images_of(values):
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, 4, 4) / 255


def chaotic(seed, kinds):
    "Answer each image by its own score, late, twice, cut, cut in half, out of range or not at all."
    draw = random.Random(seed)

    def behave(connection, n, body):
        kind = draw.choice(kinds)
        good = answer(chat(f"Final Score: {value_of(body):.4f}"))
        if kind == "late":
            time.sleep(draw.uniform(0, 0.8))  # the client waits for 0.4 seconds
        if kind == "busy":
            return connection.sendall(answer(b"", "503 Busy", "Retry-After: 0\r\n"))
        if kind == "twice":
            return connection.sendall(good + good)  # the second could be taken for the next image's
        if kind in ("cut", "half"):
            connection.sendall(good[: len(good) // 2 if kind == "half" else 0])
            return connection.close()
        return connection.sendall(good.replace(b"Final", b"Never") if kind == "wrong" else good)

    return behave


KINDS = ("good", "good", "late", "late", "busy", "twice", "cut", "half", "wrong")


@pytest.mark.fast
def test_every_score_belongs_to_its_image(serve, noted):
    "Six calls at once share the connections; the answers come late, twice, out of order, cut."
    server = serve(chaotic(0, KINDS))
    client = UnifiedReward(server.where, timeout=0.4, in_flight=8)
    values = [list(range(k, 240 + k, 6)) for k in range(6)]
    waiting = [in_background(client, images_of(v), [str(i) for i in v]) for v in values]
    attached = 0
    for some, future in zip(values, waiting):
        wanted = 1 + 4 * torch.tensor(some) / 255
        found = future.result(timeout=300)
        known = found.isfinite()
        torch.testing.assert_close(found[known], wanted[known], rtol=0, atol=1e-4)
        attached += int(known.sum())
    assert attached >= 150  # an answer without a score is not asked for again
    happened = f"{attached} of 240 images scored by {len(server.posts)} requests"
    noted(
        "a reward server answers late, twice, cut, in half, out of order",
        happened,
        "each its own score",
    )


def test_a_run_on_a_misbehaving_server_ends_as_on_a_good_one(serve, tmp_path, noted):
    def trained(name, kinds):
        server = serve(chaotic(1, kinds))
        table = SMALL | {
            "output": str(tmp_path / name),
            "iterations": 2,
            "reward": f"unified-reward:{server.where}",
        }
        trainer = Trainer(TrainConfig.from_dict(table))
        trainer.scorer.retries, trainer.scorer.wait = 20, 0.0
        rows = [
            {k: v for k, v in row.items() if not k.startswith("seconds")}
            for row in trainer.fit().metrics
        ]
        return (
            rows,
            {k: p.detach().clone() for k, p in trainer.learner.parameters.items()},
            len(server.posts),
        )

    good, bad = (
        trained("good", ("good",)),
        trained("bad", ("good", "busy", "twice", "cut", "half", "wrong")),
    )
    assert good[0] == bad[0]
    assert all(torch.equal(weight, bad[1][name]) for name, weight in good[1].items())
    assert bad[2] > good[2]
    happened = f"{bad[2]} requests instead of {good[2]}"
    noted(
        "a training on a reward server that misbehaves",
        happened,
        "metrics and weights are bit-equal",
    )


# what a call may take


def test_requests_are_bounded(serve, noted):
    "Of 600 images in 100 calls at once, no more than may be in flight are asked for."
    busy, most, lock = 0, 0, threading.Lock()

    def behave(connection, n, body):
        nonlocal busy, most
        with lock:
            busy, most = busy + 1, max(most, busy + 1)
        time.sleep(0.002)
        with lock:
            busy -= 1
        connection.sendall(answer())

    client = UnifiedReward(serve(behave).where, timeout=60.0, in_flight=4)
    waiting = [in_background(client, IMAGE.expand(6, -1, -1, -1), ["a"] * 6) for _ in range(100)]
    assert all((future.result(timeout=300) == 4).all() for future in waiting)
    assert most <= 4
    noted(
        "600 images at once for a reward server", f"at most {most} requests at once", "all scores"
    )


STUCK = """
import sys, threading, torch
from branchgrpo.rewards.scorer import Scorer, start_scoring
from branchgrpo.rewards.unified import UnifiedReward
scorer = Scorer(UnifiedReward(sys.argv[1], timeout=100.0))
waiting = [start_scoring(scorer, torch.rand(20, 3, 8, 8), ["a"] * 20) for _ in range(3)]
threading.Event().wait(1)
print("ends")
"""


def test_a_stuck_request_does_not_delay_the_end_of_a_process(serve, tmp_path, noted):
    server = serve(lambda connection, n, body: time.sleep(100))
    with open(tmp_path / "log", "w+") as log:
        process = popen([sys.executable, "-c", STUCK, server.where], stdout=log, stderr=log)
        while "ends" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        start = time.monotonic()
        assert process.wait(timeout=60) == 0
        seconds = time.monotonic() - start
    assert (tmp_path / "log").read_text() == "ends\n"
    assert seconds < LOADED
    noted(
        "a process ends while a reward server holds 60 requests",
        f"ended after {seconds:.1f} s",
        "exit code 0",
    )


class Waiting:
    "A reward on a server that answers when it is told to."

    remote = True

    def __init__(self):
        self.go = threading.Event()

    def __call__(self, images, prompts, metadata=None):
        self.go.wait()
        return [4.0] * len(images)


@pytest.mark.fast
def test_images_do_not_pile_up_before_a_server(monkeypatch):
    "Without a place, the next call waits for one, and looks for a signal meanwhile."
    monkeypatch.setattr(scorer, "PLACES", threading.BoundedSemaphore(2))
    reward = Waiting()
    first = [scorer.start_scoring(Scorer(reward), IMAGE, ["a"]) for _ in range(2)]

    def watch():
        raise KeyboardInterrupt("a signal")

    with pytest.raises(KeyboardInterrupt, match="a signal"):
        scorer.start_scoring(Scorer(reward), IMAGE, ["a"], watch=watch)
    reward.go.set()
    assert [future.result(timeout=60)[""].tolist() for future in first] == [[4.0]] * 2
    assert scorer.start_scoring(Scorer(reward), IMAGE, ["a"], watch=watch).result(timeout=60)[
        ""
    ].tolist() == [4.0]


# the way there


@pytest.mark.fast
def test_a_server_on_this_machine_is_called_without_a_proxy(serve, monkeypatch, noted):
    proxy = serve()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    _, scores, _ = scored(serve())
    assert scores.tolist() == [4.0] and proxy.heads == []
    far = UnifiedReward("http://node7.invalid:8080/v1")
    assert far(IMAGE, ["a"]).tolist() == [4.0]
    assert proxy.posts[0].startswith(b"POST http://node7.invalid:8080/v1/chat/completions")
    happened = "a server on this machine is called directly, another one by the proxy"
    noted("HTTP_PROXY is set and the reward server is here", happened, "the score")


# a run that is told to stop while it waits for a server


def train(folder, log, where, **changes):
    "Start a run of the command line, with its output in `log`."
    table = (
        SMALL
        | {"output": str(folder), "iterations": 2, "reward": f"unified-reward:{where}"}
        | changes
    )
    (folder.parent / "run.json").write_text(json.dumps(table))
    words = [
        sys.executable,
        "-m",
        "branchgrpo.cli",
        "train",
        "--config",
        folder.parent / "run.json",
    ]
    with open(log, "w") as file:
        return popen(words, stdout=file, stderr=file)


def test_a_run_is_told_to_stop_while_a_server_is_stuck(serve, tmp_path, noted):
    stuck = [True]

    def behave(connection, n, body):
        while stuck:
            time.sleep(0.1)
        connection.sendall(answer(chat(f"Final Score: {value_of(body):.4f}")))

    server = serve(behave)
    process = train(tmp_path / "run", tmp_path / "log", server.where)
    while not server.posts:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == REQUEUE, (tmp_path / "log").read_text()
    seconds = time.monotonic() - start
    assert seconds < 60, "not the 60 seconds of a request, nor the patience"
    said = (tmp_path / "log").read_text().strip().splitlines()[-1]
    stuck.clear()
    again = train(tmp_path / "run", tmp_path / "log", server.where)
    assert again.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    noted(
        "SIGTERM while a reward server is stuck", f"code 75, {said}", "started again, the run ends"
    )


def test_a_server_that_goes_during_a_run_is_named(serve, tmp_path, noted):
    "In a run of the command line, with a client that is less patient."
    server = serve(
        lambda connection, n, body: connection.sendall(answer()) if n < 8 else connection.close()
    )
    table = SMALL | {
        "output": str(tmp_path / "run"),
        "iterations": 4,
        "reward": f"unified-reward:{server.where}",
    }
    trainer = Trainer(TrainConfig.from_dict(table | {"splits": (0, 2), "checkpoint_every": 1}))
    trainer.scorer.wait = 0.01
    with pytest.raises(
        ValueError, match=f"could not be scored at iteration 1.*: {server.where}: Remote"
    ) as error:
        trainer.fit()
    assert newest(tmp_path / "run") is not None
    noted(
        "a reward server goes in the middle of a run",
        str(error.value),
        "checkpoint 1, after its 8 scores",
    )
