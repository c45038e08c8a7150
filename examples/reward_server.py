"""A reward over HTTP: start `python examples/reward_server.py 8000`, then train with
`branchgrpo train --reward server:http://localhost:8000`. The contract is on the page "A reward over
HTTP". Copy this file, and put your own model into `score`."""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image


def score(image: Image.Image, prompt: str) -> float | None:
    "Return how red an image is, and None where there is no score."
    red, green, blue = image.resize((1, 1)).getpixel((0, 0))
    return (red - (green + blue) / 2) / 255 if prompt else None


class Handler(BaseHTTPRequestHandler):
    def scores(self, asked: dict) -> list[float | None]:
        files = [io.BytesIO(base64.b64decode(image)) for image in asked["images"]]
        return [score(Image.open(file), prompt) for file, prompt in zip(files, asked["prompts"])]

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": self.scores(asked)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        "Print no line per request."


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
