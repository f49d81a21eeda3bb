"""The daemon and the model that `tests/python.rs` provides: LAPIS_SOCKET, LAPIS_TEST_MODEL, LAPIS_TEST_LAPISD."""

import os
import subprocess
from pathlib import Path

import pytest

import lapis


@pytest.fixture
def client():
    with lapis.Client(name="pytest") as client:
        before = client.stats()
        yield client
        # A test that leaves something mapped or allocated has found a leak.
        after = client.stats()
        assert (after["mappings"], after["allocations"]) == (before["mappings"], before["allocations"])


@pytest.fixture
def model_path():
    return Path(os.environ["LAPIS_TEST_MODEL"])


@pytest.fixture
def daemon(tmp_path):
    """A daemon of the test's own, to be killed."""
    spill = tmp_path / "spill"
    spill.mkdir()
    socket = tmp_path / "s"
    command = [os.environ["LAPIS_TEST_LAPISD"], "--device", "sim", "--socket", socket, "--spill-dir", spill]
    command += ["--vram", "2MiB", "--ram", "4MiB", "--nvme", "8MiB", "--page-size", "64KiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "LAPIS_LOG": "info"})
    for line in process.stderr:
        if "ready on" in line:
            break
    process.socket = socket
    yield process
    process.kill()
    process.wait()
