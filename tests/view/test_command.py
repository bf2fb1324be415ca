"""``stacktok view`` as a shell sees it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.tiny import build

COMMAND = [sys.executable, "-c", "from stacktok.cli import main; main()", "view", "--no-browser"]


def test_the_command_serves_a_model_on_this_machine_alone(tmp_path: Path) -> None:
    tiny = build("llava")
    tiny.model.save_pretrained(tmp_path)
    tiny.processor.save_pretrained(tmp_path)
    server = subprocess.Popen([*COMMAND, "--port", "0", "--model", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = ""
        for line in server.stderr:
            # A narrow terminal may break the line before or after the address.
            said += line.replace("\n", " ")
            if "Ctrl+C" in said:
                break
        assert "inspector is at" in said
        address = said.split("inspector is at", 1)[1].split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address + "api/info") as answer:
            info = json.load(answer)
        assert info["model"] == str(tmp_path)
        assert info["methods"][0] == "stacktok"
        with urllib.request.urlopen(address) as answer:
            assert b"StackTok inspector" in answer.read()
    finally:
        server.terminate()
        server.wait(30)


def test_errors_are_one_clear_line() -> None:
    done = subprocess.run([*COMMAND, "--model", "no/such/model"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("stacktok: ")
    assert "no/such/model" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_busy_port_is_named_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, "--port", str(port), "--model", "no/such/model"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in done.stderr
    assert "another --port" in done.stderr


STUCK = """
import socket, threading
from types import SimpleNamespace
from stacktok.view.server import create_app, serve

def answer(*args):
    print("busy", flush=True)
    threading.Event().wait()

engine = SimpleNamespace(answer=answer)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
serve(create_app(engine), listener)
"""


def test_ctrl_c_ends_the_server_while_the_model_is_stuck() -> None:
    server = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        body = b'{"image": "a", "question": ""}'
        lines = ["POST /api/answer/full HTTP/1.1", "Host: 127.0.0.1", "X-Page: p", "X-Serial: 1"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        head = "\r\n".join(lines)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + body)
            assert server.stdout.readline() == "busy\n"
            server.send_signal(signal.SIGINT)
            server.wait(60)
    finally:
        server.kill()
        server.wait(30)
