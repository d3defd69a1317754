"""A SLURM cluster of one machine, started for a test in a separate folder."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
NodeName={host} CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Returns the reason why a cluster cannot be started here; None if it can."""
    if gone := [name for name in PROGRAMS if _program(name) is None]:
        return f"{', '.join(gone)} not installed (apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "a cluster of one's own is started as root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """Starts munged, slurmctld and slurmd; yields slurm.conf, which SLURM_CONF has to name."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = platform.node().split(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, controller=_free_port(), daemon=_free_port(), folder=folder))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    inside = folder / "munge"
    commands = (
        ["munged", "--foreground", "--force", "--num-threads=1", f"--key-file={key}", f"--socket={inside}/socket",
         f"--pid-file={inside}/pid", f"--log-file={inside}/log", f"--seed-file={inside}/seed"],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D"],
    )  # fmt: skip
    started = []
    try:
        for command in commands:
            program = str(_program(command[0]))
            with (folder / f"{command[0]}.out").open("wb") as out:
                started.append(
                    subprocess.Popen([program, *command[1:]], env=environment, stdout=out, stderr=subprocess.STDOUT)
                )
            time.sleep(0.3)
        _wait(environment)
        yield config
    finally:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", "--user=root", "--full"], env=environment, timeout=10, capture_output=True)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(environment: dict[str, str]) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = subprocess.run(["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True)
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise RuntimeError(f"the cluster does not come up: {found.stdout} {found.stderr}")
