from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from ddp_hydra.console.signals import lasting
with lasting():
    logging.basicConfig(stream=sys.stderr)
    print("first", flush=True)
    print("heard", file=sys.stderr)
    input()
    for number in range(10_000):
        print(number)
    logging.warning("not heard")
    print("not heard", file=sys.stderr, end="")
open(sys.argv[1], "w").write("to its end")
"""


@pytest.mark.integration
@pytest.mark.parametrize("unbuffered", [False, True])
def test_nobody_who_reads_is_no_reason_to_fail(unbuffered, tmp_path):
    """As with `| head -1`."""
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, *["-u"] * unbuffered, "-c", PROGRAM, str(done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert (program.stdout.readline(), program.stderr.readline()) == (b"first\n", b"heard\n")
        program.stdout.close()
        program.stderr.close()
        program.stdin.write(b"\n")
        program.stdin.close()
        assert program.wait() == 0
    assert done.read_text() == "to its end"


def test_all_is_written_where_somebody_reads():
    program = (
        "import sys; from ddp_hydra.console.signals import lasting\n"
        "with lasting(): print('é' * 100_000); sys.exit('bye')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env={**os.environ, "PYTHONUTF8": "1"}, check=False
    )
    assert (ended.returncode, ended.stdout.decode(), ended.stderr) == (1, "é" * 100_000 + "\n", b"bye\n")


@pytest.mark.parametrize("call", ["with lasting(): print(text)", "printed(text + chr(10))"])
def test_a_character_that_the_terminal_lacks_is_written_by_its_number(call):
    program = f"text = 'pr\\u00e9cision \\u00b1 0.1 \\u2026'\nfrom ddp_hydra.console.signals import *\n{call}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert ended.stdout == b"pr\\xe9cision \\xb1 0.1 \\u2026\n", ended.stderr


def test_what_a_test_has_put_in_the_place_of_stdout_stays_there(capsys):
    from ddp_hydra.console.signals import lasting

    with lasting():
        print("here")
    assert capsys.readouterr().out == "here\n"
