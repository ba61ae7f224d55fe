"""The hub, played by a server in this process: download, cache, refusal, silence."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from slipstream.errors import CapacityError, ModelError
from slipstream.model import hub, load, store
from slipstream.testing.tiny import save_tiny

COMMIT = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves one repository, org/tiny, as the hub does: description, tree, files."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.downloads: list[str] = []
        self.gated = False


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path, files = self.path.split("?")[0], self.server.files
        if self.server.gated:
            self.reply(b"{}", body, 403, **{"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": digest(d)} for n, d in files.items()]
            self.reply(json.dumps(tree).encode(), body)
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in files]
            about = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.reply(json.dumps(about).encode(), body)
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/") and path.split("/")[-1] in files:
            name = path.split("/")[-1]
            if body:
                self.server.downloads.append(name)
            data = files[name]
            self.reply(data, body, ETag=f'"{digest(data)}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.reply(b"{}", body, 404, **{"X-Error-Code": "RepoNotFound"})

    def reply(self, data: bytes, body: bool, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(save_tiny(tmp_path / "origin")) as server:
        point_to(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def point_to(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_to(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path, monkeypatch)


def test_a_repository_is_downloaded_once_and_used_without_the_hub(
    server, tmp_path, monkeypatch, recorder, capfd
):
    loaded = load.load("org/tiny", progress=recorder)
    assert loaded.name == "org/tiny" and loaded.path.name == COMMIT
    assert any(text == "downloading org/tiny" and total > 100_000 for text, total in recorder.stages)
    count = len(server.downloads)
    assert load.load("org/tiny").path == loaded.path and len(server.downloads) == count
    away(tmp_path, monkeypatch)
    assert load.load("org/tiny").path == loaded.path
    assert load.local_folder("org/tiny") == loaded.path
    assert capfd.readouterr() == ("", "")


def test_code_is_only_fetched_when_trusted(server, tmp_path):
    server.files["modeling_evil.py"] = b"raise SystemExit"
    load.resolve("org/tiny")
    assert "modeling_evil.py" not in server.downloads
    load.resolve("org/tiny", trust_remote_code=True)
    assert "modeling_evil.py" in server.downloads


def test_a_repository_with_pickles_only_is_refused_before_the_download(server):
    server.files["pytorch_model.bin"] = server.files.pop("model.safetensors")
    with pytest.raises(ModelError, match=r"no \.safetensors weights \(only \.bin\)"):
        load.load("org/tiny")
    assert server.downloads == []


def test_a_gated_repository_names_the_fix(server):
    server.gated = True
    with pytest.raises(
        ModelError, match=r"gated: accept its terms at https://huggingface\.co/org/tiny .*HF_TOKEN"
    ):
        load.load("org/tiny")


def test_a_repository_that_does_not_exist(server):
    with pytest.raises(
        ModelError, match=r"unknown model 'org/nothing'.*no such repository.*HF_TOKEN"
    ) as error:
        load.load("org/nothing")
    assert "\n" not in str(error.value)


def test_too_little_disk_for_the_download(server, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(CapacityError, match=r"downloading org/tiny .*10 bytes are free"):
        load.load("org/tiny")


def test_a_hub_that_refuses_connections(tmp_path, monkeypatch):
    away(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"not found on the hub \(the hub http.* cannot be reached"):
        load.load("org/tiny")


def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch, recorder):
    monkeypatch.setattr(hub, "PROBE_SECONDS", 1.1)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        point_to(f"http://127.0.0.1:{mute.getsockname()[1]}", tmp_path, monkeypatch)
        found = hub.fetch_from_hub("org/tiny", trust_remote_code=False, progress=recorder)
    assert isinstance(found, hub.HubMiss) and "cannot be reached" in found.reason


def test_offline_mode_is_honoured(server, monkeypatch, recorder):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = hub.fetch_from_hub("org/tiny", trust_remote_code=False, progress=recorder)
    assert isinstance(found, hub.HubMiss) and "HF_HUB_OFFLINE" in found.reason
    assert server.downloads == []
