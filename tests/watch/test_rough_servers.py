"""Servers, addresses and files as they are found: broken ones are told in one line, and hide no other."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slipstream.cli.main import build_app
from slipstream.errors import ParameterError
from slipstream.watch import history
from slipstream.watch.fetch import get, metrics_url
from slipstream.watch.metrics import WatchError, parse
from slipstream.watch.rates import rates

GOOD = b"HTTP/1.0 200 OK\r\n\r\nvllm:spec_decode_num_drafts_total 10\nvllm:num_requests_running 1\n"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """A server that says these bytes to whoever connects, and closes, or stays silent after them."""
    opened = list[socket.socket]()

    def start(said: bytes, *, stays: bool = False) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                client.recv(65536)
                client.sendall(said)
                if stays:
                    opened.append(client)
                else:
                    client.close()

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    yield start
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"-ERR unknown command 'GET'\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nvllm:x 1\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp://x/y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n\x1f\x8b\x08\x00garbage",
        b'HTTP/1.1 200 OK\r\n\r\n<html><body class="x">not Prometheus {a=b} 3</body></html>',
        b'HTTP/1.1 200 OK\r\n\r\nvllm:x{a="b 3\nvllm:y{',
        b'HTTP/1.1 200 OK\r\n\r\nvllm:x{a="b"} three\n',
    ],
)
def test_an_answer_that_is_none(answering: Callable[..., str], said: bytes) -> None:
    url = answering(said)
    with pytest.raises(WatchError) as told:
        parse(get(url, 2), url, 0.0)
    assert url in str(told.value) and len(str(told.value)) < 500


def test_a_server_that_says_little_by_little(answering: Callable[..., str]) -> None:
    with pytest.raises(WatchError, match="timed out"):
        get(answering(b"HTTP/1.0 200 OK\r\n\r\nvllm:x 1\n", stays=True), 0.3)


def test_a_proxy_is_not_asked_for_this_machine(
    answering: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert "vllm:" in get(answering(GOOD))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:8000?x=1", "http://h:8000/metrics?x=1"),
        ("http://h:8000/a/metrics?x=/y#z", "http://h:8000/a/metrics?x=/y"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("HTTPS://H:1/", "https://H:1/metrics"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert metrics_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "http://h:port",
        "http://h:99999",
        "http://h:0",
        "http://[::1",
        "http://h 8000",
        "h\n:1",
        "ftp://h",
        "http://",
        "://",
        "",
    ],
)
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(WatchError, match="write it as http"):
        metrics_url(given)


def test_a_password_is_neither_sent_nor_said() -> None:
    with pytest.raises(WatchError) as told:
        metrics_url("http://me:secret@host:8000")
    assert "secret" not in str(told.value) and "host" in str(told.value)


# -- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-Inf"])
def test_numbers_that_are_none(odd: str) -> None:
    names = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    text = "".join(f"vllm:spec_decode_num_{name} {odd}\n" for name in names)
    text += f"vllm:num_requests_running {odd}\nvllm:num_requests_waiting 2\n"
    seen = rates(parse(text, "u", 1.0))
    assert seen.drafts is None and seen.running is None and seen.waiting == 2
    json.dumps(seen.as_dict(), allow_nan=False)
    assert rates(parse(f"sglang:spec_accept_length {odd}\nsglang:num_running_reqs 1\n", "u", 1.0)).tau is None


@pytest.mark.parametrize("position", ["999999999", "²", "-1", "x", ""])
def test_positions_that_are_none(position: str) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    read = parse(f'{name}{{position="{position}"}} 3\n{name}{{position="0"}} 5\n', "u", 1.0)
    assert read.per_position == (5.0,)


# -- files ------------------------------------------------------------------------------------------


def test_a_history_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "h.jsonl"
    seen = rates(parse("vllm:spec_decode_num_drafts_total 10\n", "u", 1.0))
    history.append(file, [seen], 0.0)
    whole = file.read_text()
    file.write_text(whole + whole[:40])
    history.append(file, [seen, seen], 0.0)
    lines = file.read_text().splitlines()
    assert len(lines) == 4 and lines[0] == lines[2] == lines[3] and lines[1] == whole[:40]
    with pytest.raises(ParameterError, match="line 2 of"):
        history.read(file)


@pytest.mark.parametrize("line", ["[]", "3", "{}", '{"time": "2026-01-01"}', "null"])
def test_a_line_that_is_no_reading(tmp_path: Path, line: str) -> None:
    file = tmp_path / "h.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ParameterError, match="line 1 of"):
        history.chart(history.read(file), tmp_path / "c.png")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParameterError, match="no text"):
        history.read(file)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), prog_name="slipstream")


def test_what_the_command_is_told(answering: Callable[..., str], tmp_path: Path) -> None:
    url, folder = answering(GOOD), tmp_path / "none" / "x"
    for arguments, message in (
        (("--every", "inf"), "--every is a number"),
        (("--cost", "inf"), "--cost is a number"),
        (("--predicted-tau", "inf"), "--predicted-tau is a number"),
        (("--history", str(tmp_path / "h"), "--chart", str(folder)), "cannot be written"),
        (("--history", str(folder)), "cannot be written"),
    ):
        done = invoke("watch", url, "--once", "--json", *arguments)
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert len(json.loads(invoke("watch", url, url, "--once", "--json").stdout)) == 1, (
        "named twice, read once"
    )
    assert not math.isnan(json.loads(invoke("watch", url, "--once", "--json").stdout)[0]["drafts"])
