"""One engine over the devices of two processes, which speak over the loopback address."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from checkpoints import V3

TESTS = pathlib.Path(__file__).parents[1]


def begin(dies: bool) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = os.pathsep.join([str(TESTS / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    return [
        subprocess.Popen(
            [sys.executable, TESTS / "lib" / "one_of_two.py", address, str(rank), "dies" if dies else "lives"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def line(text: str) -> dict:
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


@pytest.mark.slow
def test_two_processes_serve_one_model():
    processes = begin(dies=False)
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    with np.load(V3 / "expected.npz") as file:
        greedy = file["greedy_0"].tolist()
    for output in map(line, outputs):
        assert output["tokens"] == greedy[: len(output["tokens"])] and len(output["tokens"]) == 8
        assert output["compiles"] == 0


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other():
    """With an error, within a minute: it does not wait for ever."""
    first, second = begin(dies=True)
    assert second.wait(timeout=240) == 0
    died = time.monotonic()
    output, _ = first.communicate(timeout=60)
    assert first.returncode != 0 and time.monotonic() - died < 60
    assert line(output)["tokens"] and "went on alone" not in output
    second.stdout.close()
