"""A reward on a server scores images while the next ones are made."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

SECONDS = 0.3  # per request


class Slow(BaseHTTPRequestHandler):
    "Scores every image 4 after a while, as a language model does; several requests at once."

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.server.events.append((time.perf_counter(), "request"))
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(SECONDS)
        text = json.dumps({"choices": [{"message": {"content": "Final Score: 4"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads, server.events = True, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def trainer_of(server, folder, **changes):
    "A trainer whose decodings and predictions are noted beside the server's requests."
    table = {"steps": 6, "splits": (0, 2), "prompts_per_iteration": 2, "tracker": "none", "output": str(folder)}
    table |= {"reward": f"unified-reward:http://127.0.0.1:{server.server_port}/v1", "evaluation_prompts": 32}
    trainer = Trainer(TrainConfig.from_dict(table | changes))
    for name in ("decode", "predict"):
        note(trainer.policy, name, server.events)
    return trainer


def note(policy, name, events):
    function = getattr(policy, name)

    def noted(*arguments):
        result = function(*arguments)
        events.append((time.perf_counter(), name))
        return result

    setattr(policy, name, noted)


def times(server, kind):
    return [at for at, name in server.events if name == kind]


def test_requests_run_while_later_images_are_decoded(tmp_path, server):
    trainer = trainer_of(server, tmp_path / "run", decode_batch=1)
    trainer.step()  # the first calls are slower
    server.events.clear()
    row = trainer.step()
    assert row["reward"] == 4 and len(times(server, "request")) == 8
    assert min(times(server, "request")) < max(times(server, "decode"))


def test_requests_of_an_evaluation_run_while_the_next_prompts_are_sampled(tmp_path, server):
    trainer = trainer_of(server, tmp_path / "run")
    trainer.evaluator(trainer.policy)  # the first calls are slower
    server.events.clear()
    trainer.evaluator(trainer.policy)
    requests, predictions = times(server, "request"), times(server, "predict")
    assert len(requests) == 32
    assert sum(at > min(requests) for at in predictions) >= len(predictions) / 2
