"""Keys and passwords: given by variables or in a name, they are in nothing that is written or
printed."""

import base64
import json
import os
import sys
from urllib.parse import quote

import pytest
from commands import run
from test_cluster import submit
from test_faults_servers import Server, answer, chat, value_of

from branchgrpo import cli
from branchgrpo.rewards.addresses import TOKEN
from branchgrpo.training.config import TrainConfig

CANARY = "canary7f3a"
SECRETS = {
    TOKEN: f"sk-{CANARY}-reward",
    "HF_TOKEN": f"hf_{CANARY}hub",
    "HUGGING_FACE_HUB_TOKEN": f"hf_{CANARY}old",
    "WANDB_API_KEY": f"{CANARY}wandb",
    "OPENAI_API_KEY": f"sk-{CANARY}-openai",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}aws",
    "HTTPS_PROXY": f"http://me:{CANARY}@proxy.invalid:3128",
}
SMALL = ["--steps", "4", "--splits", "0", "--prompts-per-iteration", "2"]
SMALL += ["--evaluation-prompts", "4", "--iterations", "1"]


class Echo(Server):
    "Says in every answer what it was sent, the key too; `status` is that of the answers to POST."

    status, scores = "200 OK", True

    def echo(self, connection, n, body):
        said = self.heads[-1].decode()
        text = f"Final Score: {value_of(body):.4f}" if self.scores else said
        connection.sendall(
            answer(chat(text) if self.status.startswith("200") else said.encode(), self.status)
        )


@pytest.fixture
def server():
    made = Echo()
    made.behave = made.echo
    yield made
    made.close()


def forms(canary):
    "Return a text as it may stand in a file."
    raw = canary.encode()
    coded = {base64.b64encode(b"x" * k + raw + b"xx")[4:-4] for k in range(3)}
    return {
        raw,
        quote(canary).encode(),
        raw[::-1],
        raw.hex().encode(),
        *(code for code in coded if len(code) > 6),
    }


def found_in(folder, *texts):
    "Return where the canary is: in files below a folder, in their names, or in texts."
    places = [str(path) for path in folder.rglob("*") if CANARY in str(path.relative_to(folder))]
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            places += [str(path) for form in forms(CANARY) if form in data]
    return places + [
        text[max(0, text.find(CANARY) - 200) :][:400] for text in texts if CANARY in text
    ]


COMMANDS = """
import json, sys
from branchgrpo.cli import main
for words in json.loads(sys.argv[1]):
    print("code", main(words), words[0], flush=True)
"""


def commands(folder, *lists):
    "Run commands in one process that has all the secrets; return what it printed."
    words = [sys.executable, "-c", COMMANDS, json.dumps(lists)]
    done = run(words, cwd=folder, env=os.environ | SECRETS, timeout=600)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_run_its_evaluation_and_the_doctor_keep_the_keys_to_themselves(server, tmp_path, noted):
    name = f"tiny-clip+0.1*unified-reward:{server.where}"
    said = commands(
        tmp_path,
        [
            "train",
            "--reward",
            name,
            "--held-out",
            f"unified-reward:{server.where}",
            "--output",
            "run",
            *SMALL,
        ],
        [
            "evaluate",
            "--output",
            "eval",
            "--rewards",
            f"unified-reward:{server.where}",
            "--limit",
            "2",
            "--steps",
            "2",
        ],
        ["doctor", "--reward", name],
        ["train", "--reward", name, "--print-config"],
        ["sample", "--prompt", "a red 3", "--steps", "2"],
        ["rewards"],
        ["train", "--reward", "nothing", "--output", "other"],
    )
    codes = [line.split()[1] for line in said.splitlines() if line.startswith("code ")]
    assert codes == ["0", "0", "0", "0", "0", "0", "2"], said
    assert f"authorization: Bearer {SECRETS[TOKEN]}".encode() in server.posts[0], (
        "the server itself gets the key"
    )
    assert (tmp_path / "run/run.json").is_file() and list(tmp_path.rglob("events.out*"))
    assert found_in(tmp_path, said) == []
    files = sum(path.is_file() for path in tmp_path.rglob("*"))
    what = "keys of seven services are set: train, evaluate, doctor, sample, an error"
    noted(
        what,
        f"none of them is in {files} files or in what was printed",
        "only the reward server got its key",
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    "status", ["400 No", "401 No", "403 No", "404 No", "307 Elsewhere", "500 Oops", "200 OK"]
)
def test_a_server_that_repeats_the_key(server, status, tmp_path, monkeypatch, noted):
    "Also where its answer is an error or has no score."
    monkeypatch.setenv(TOKEN, SECRETS[TOKEN])
    from test_faults_servers import IMAGE

    from branchgrpo.rewards.scorer import Scorer
    from branchgrpo.rewards.unified import UnifiedReward

    server.status, server.scores = status, False
    client = UnifiedReward(server.where, timeout=20.0, retries=0)
    scorer = Scorer(client, retries=0)
    try:
        said = f"{scorer(IMAGE, ['a'])[0].tolist()} {scorer.last_error}"
    except ValueError as error:
        said = str(error)
    assert SECRETS[TOKEN].encode() in server.posts[0]
    assert CANARY not in said and status[:3] in said or "no score in the answer" in said
    noted(
        f"a reward server repeats the key in an answer {status[:3]}", said, "the key is not printed"
    )


LEAKING = {
    "a password": "http://me:{}@host:8080/v1",
    "a user": "https://{}@host/v1",
    "a key in the query": "http://host/v1?api_key={}",
    "a fragment": "http://host/v1#{}",
    "a password without http": "me:{}@host/v1",
}
PLACES = {
    "train --reward": ["train", "--reward", "{}", "--output", "run"],
    "train --reward, in a sum": ["train", "--reward", "0.5*tiny-clip+0.5*{}", "--output", "run"],
    "train --held-out": ["train", "--held-out", "tiny-hps,{}", "--output", "run"],
    "train --print-config": ["train", "--reward", "{}", "--print-config"],
    "a misspelt reward": ["train", "--reward", "unyfied{}", "--output", "run"],
    "evaluate --rewards": ["evaluate", "--rewards", "{}", "--output", "eval"],
    "doctor": ["doctor", "--reward", "{}"],
    "reproduce --set": ["reproduce", "quickstart", "--scale", "smoke", "--set", "reward={}"],
    "reproduce --slurm": [
        "reproduce",
        "quickstart",
        "--scale",
        "smoke",
        "--set",
        "reward={}",
        "--slurm",
        "--dry-run",
    ],
}


@pytest.mark.fast
@pytest.mark.parametrize("place", PLACES)
def test_a_secret_in_an_address_is_refused_and_not_repeated(
    place, tmp_path, monkeypatch, capsys, noted
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reproduce").symlink_to(
        cli.__file__.removesuffix("branchgrpo/cli.py") + "reproduce"
    )
    for address in LEAKING.values():
        name = f"unified-reward:{address.format(CANARY)}"
        code = cli.main([word.format(name) for word in PLACES[place]])
        out, err = capsys.readouterr()
        assert code == 2, (place, address, out, err)
        assert TOKEN in err and err.count("\n") == 1
        assert CANARY not in out + err
        assert [path.name for path in tmp_path.iterdir()] == ["reproduce"]
    noted(
        f"a password in the address of a reward server: {place}",
        f"code 2, {err.strip()}",
        "nothing is written",
    )


@pytest.mark.fast
def test_a_key_that_would_add_a_header(monkeypatch, server):
    monkeypatch.setenv(TOKEN, f"{CANARY}\r\nX-Other: 1")
    from branchgrpo.rewards.unified import UnifiedReward

    with pytest.raises(ValueError, match=f"{TOKEN}: the value is not one word") as error:
        UnifiedReward(server.where)
    assert CANARY not in str(error.value) and server.heads == []


def test_a_task_of_a_cluster_writes_no_key(server, tmp_path, monkeypatch, noted):
    "submitit's files, the log and the settings of a run that is launched, and the run itself."
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    config = TrainConfig.from_dict(
        {
            "iterations": 1,
            "steps": 4,
            "splits": (0,),
            "prompts_per_iteration": 2,
            "evaluate_every": 0,
        }
        | {"reward": f"unified-reward:{server.where}"}
    )
    job = submit(tmp_path, 1, sys.executable, config)
    assert len(job.results()) == 1
    assert SECRETS[TOKEN].encode() in server.posts[0], "the task has the key"
    written = {path.suffix for path in (tmp_path / "slurm").rglob("*")}
    assert {".pkl", ".out", ".err"} <= written and list(tmp_path.glob("runs/*/log.yaml"))
    assert found_in(tmp_path) == []
    noted(
        "keys are set where a run is handed to a cluster",
        "the task has them, submitit's files do not",
        "the run",
    )


def test_an_executed_page_holds_no_key(tmp_path, noted):
    from test_reproduce import ROOT

    (tmp_path / "reproduce").symlink_to(ROOT / "reproduce")
    said = commands(tmp_path, ["reproduce", "quickstart", "--scale", "smoke"])
    assert "code 0 reproduce" in said, said
    pages = list((tmp_path / "runs/reproduce").rglob("quickstart.ipynb"))
    assert len(pages) == 1
    assert found_in(tmp_path / "runs", said) == []
    files = sum(path.is_file() for path in (tmp_path / "runs").rglob("*"))
    noted(
        "keys are set where a page is executed",
        f"none of them is in {files} files",
        "the page and its figures",
    )
