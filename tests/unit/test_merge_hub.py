"""--push_to_hub: refused before anything is merged when it cannot work, and what goes where when it can.

The hub is replaced at huggingface_hub.HfApi, whose create_repo and upload_folder are called as it documents them.
"""

import contextlib
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir
from merge import hub
from merge.__main__ import main
from tests.unit.merge_fixture import shared_run


class Hub:
    """Answers like HfApi; keeps what it was asked."""

    calls: tuple | list = ()
    fault: Exception | None = None

    def whoami(self) -> dict:
        return {"name": "me"}

    def create_repo(self, repo_id, *, private=None, repo_type=None, exist_ok=False):
        self.calls.append(("create", repo_id, private, repo_type, exist_ok))
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message=None):
        if self.fault:
            raise self.fault
        self.calls.append(("upload", repo_id, sorted(file.name for file in Path(folder_path).iterdir())))


@pytest.fixture
def stub(monkeypatch) -> type[Hub]:
    made = type("Stub", (Hub,), {"calls": []})
    monkeypatch.setattr("huggingface_hub.HfApi", made)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    return made


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(shutil.copytree(shared_run().path, tmp_path / "run"))


def test_the_checkpoint_with_its_card_is_uploaded_and_can_be_again(run, stub, capsys):
    arguments = ["--run", str(run.path), "--policy", "grpo", "--format", "bf16"]
    assert main([*arguments, "--skip_verify", "--push_to_hub", "me/tiny"]) == 0
    assert stub.calls[0] == ("create", "me/tiny", None, "model", True)
    what, where, files = stub.calls[1]
    assert (what, where) == ("upload", "me/tiny")
    assert {"README.md", "config.json", "manifest.json", "tokenizer.json", "generation_config.json"} <= set(files)
    assert "uploaded: https://hub.example/me/tiny" in capsys.readouterr().out
    stub.calls.clear()
    assert main(["card", "--run", str(run.path), "--push_to_hub", "me/again", "--hub_private"]) == 0
    assert stub.calls[0] == ("create", "me/again", True, "model", True)
    assert stub.calls[1][:2] == ("upload", "me/again")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("grpo", "fp8")], {"grpo/fp8": "me/x"}),
        ([("base", "fp8"), ("grpo", "fp8")], {"grpo/fp8": "me/x"}),
        ([("base", "fp8"), ("grpo", "bf16"), ("grpo", "fp8")], {"grpo/bf16": "me/x-bf16", "grpo/fp8": "me/x-fp8"}),
        ([("base", "fp8")], {"base/fp8": "me/x"}),
    ],
)
def test_the_policy_is_pushed_under_the_name_and_several_formats_under_one_each(places, expected):
    found = hub.destinations("me/x", {(policy, name): Path(policy, name) for policy, name in places})
    assert {str(place): repo for place, repo in found.items()} == expected


def test_a_format_that_was_refused_is_not_uploaded(run, stub):
    arguments = ["--run", str(run.path), "--policy", "grpo", "--format", "bf16", "nf4", "--skip_verify"]
    assert main([*arguments, "--push_to_hub", "me/tiny"]) == 1
    assert [call[1] for call in stub.calls] == ["me/tiny", "me/tiny"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("name", "not a repository name"),
        ("token", "there is none. Set HF_TOKEN"),
        ("refused", "does not accept the token"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_read(run, stub, monkeypatch, fault, message):
    def refuse(_):
        raise OSError("401 Client Error. Invalid token")

    if fault == "token":
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    if fault == "refused":
        monkeypatch.setattr(stub, "whoami", refuse)
    repo_id = "a//b" if fault == "name" else "me/tiny"
    with pytest.raises(BadInput, match=message):
        main(["--run", str(run.path / "nowhere"), "--format", "bf16", "--push_to_hub", repo_id])
    assert stub.calls == []


def test_an_upload_that_fails_says_that_the_checkpoint_is_there(run, stub):
    stub.fault = OSError("connection lost")
    with pytest.raises(CheckFailed, match=r"is written, and was not uploaded to me/tiny: connection lost"):
        main([*f"--run {run.path} --policy grpo --format bf16 --skip_verify --push_to_hub me/tiny".split()])
    assert (run.merged / "grpo" / "bf16" / "manifest.json").is_file()


class Whoami(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer hf_right"
        body = json.dumps({"name": "me"} if right else {"error": "Invalid username or password."}).encode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("token", "said"), [("hf_right", None), ("hf_wrong", "does not accept the token"), ("", "there is none")]
)
def test_the_token_is_taken_from_the_environment_and_asked_of_the_hub(tmp_path, monkeypatch, token, said):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Whoami)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = {"ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": False}
    constants |= {"HF_TOKEN_PATH": str(tmp_path / "token"), "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens")}
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        with contextlib.nullcontext() if said is None else pytest.raises(BadInput, match=said):
            hub.check_access("me/tiny")
    finally:
        server.shutdown()
