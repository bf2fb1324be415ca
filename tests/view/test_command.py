"""``stacktok view`` as a shell sees it."""

from __future__ import annotations

import json
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
