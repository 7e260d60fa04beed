"""Python programs, run as a user runs them, in processes of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run")
TIME_LIMIT = 280


def python(*arguments: str, cwd: Path | None = None, **variables: str) -> str:
    """What a Python program prints; it and all that it has started end with this call.

    Args:
        *arguments: of the interpreter.
        cwd: the folder to run in.
        **variables: more of its environment.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "error",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIME_LIMIT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out
