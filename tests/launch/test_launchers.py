"""The launchers of clusters, with the cluster played by a few lines: what reaches each process, and
what is said.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from places import ROOT

from rlhf_jax.config.command_line import place, read
from rlhf_jax.runtime.lost_ranks import LOST

HARD = (
    "--config",
    "my configs/a.py:gpu",
    "--config.a=b=c",
    '--config.b=it\'s "so"',
    "--config.c=(1, 2)",
    "--config.d=",
)
HARD += ("$HOME `id` $(id)", "*", "a;b|c&d>e", "back\\slash", "two\nlines", "#", "~", "")
PYTHON = """#!{python}
import json, os, sys
if "COMMANDS" in os.environ:
    print(*sys.argv, file=open(os.environ["COMMANDS"], "a"))
if sys.argv[1] == "-c":
    exec(sys.argv[2])
    sys.exit()
sys.stdout.write(json.dumps([os.getcwd(), *sys.argv[1:]]) + "\\n")  # at once: ranks share it
sys.exit({code})
"""
TOLD = """#!/usr/bin/env bash
printf '%s ' "$0" "$@" >>"$COMMANDS"
"""
GCLOUD = """
if [[ $4 == scp ]]; then
  for worker in 1 2; do mkdir -p "$HOME/$worker/rlhf_jax" && cp "$5" "$HOME/$worker/${6#*:}"; done
  exit
fi
while (($#)) && [[ $1 != --command ]]; do shift; done
for worker in 1 2; do export HOME="${HOME%/[12]}/$worker" && cd && bash -c "$2" || exit; done
"""
XPK = """
while (($#)) && [[ $1 != --command ]]; do shift; done
cd "$HOME" && for worker in 1 2; do bash -c "$2" || exit; done
"""
SCONTROL = """
[[ $* == 'show hostnames n[7-8]' ]] && printf 'n7\\nn8\\n'
[[ $* == 'requeue 4099' ]] && echo queued again >&2
"""
SRUN = """
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 "$@" || code=$?; done
exit "${code:-0}"
"""


def launched(
    folder: Path, *words: str, code: int = 0
) -> tuple[list[list[str]], subprocess.CompletedProcess]:
    """What each process heard, its own folder first, and how the launcher ended; a process ends
    with this code.
    """
    tools = {"gcloud": GCLOUD, "scontrol": SCONTROL, "srun": SRUN, "xpk": XPK}
    tools = {name: TOLD + text for name, text in tools.items()}
    tools["python"] = PYTHON.format(python=sys.executable, code=code)
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "rlhf-jax").unlink(missing_ok=True)
    (folder / "rlhf-jax").symlink_to(folder / "python")
    (folder / "rlhf_jax").mkdir(exist_ok=True)
    job = {"SLURM_JOB_NODELIST": "n[7-8]", "SLURM_JOB_ID": "4099", "HOME": str(folder)}
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "COMMANDS": str(folder / "commands")}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | job | paths,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    heard = [json.loads(re.sub(r"^\[\d+\] ", "", line)) for line in done.stdout.splitlines()]
    return heard, done


@pytest.mark.slow
def test_every_host_of_a_tpu_hears_the_words_as_they_were_written(tmp_path):
    heard, done = launched(tmp_path, "launch/tpu.sh", "name", "zone", *HARD)
    own = ["launch/train.py", "--processes", "auto", *HARD]
    folders = [str(tmp_path / worker / "rlhf_jax") for worker in "12"]
    assert heard == [[folder, *own] for folder in folders] and done.returncode == 0, done.stderr
    keys = [tmp_path / worker / ".rlhf_jax_key" for worker in "12"]
    assert {len(key.read_text().strip()) for key in keys} == {64}
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}
    assert keys[0].read_text() == keys[1].read_text()
    with subprocess.Popen(["sleep", "3"]) as run:
        (tmp_path / "1" / "rlhf_jax" / "run.pid").write_text(str(run.pid))
        threading.Thread(target=run.wait).start()  # else it is there, as a zombie
        heard, _ = launched(tmp_path, "launch/tpu.sh", "name", "zone", "another")
    assert [words[-1] for words in heard] == [HARD[-1], "another"], "the first is followed"
    assert (tmp_path / "1" / "rlhf_jax" / "run.code").read_text() == "0\n"


def test_every_node_of_a_slurm_job_hears_the_words_and_its_rank(tmp_path):
    heard, done = launched(tmp_path, "launch/slurm.sh", *HARD)
    start = [
        str(ROOT),
        "launch/train.py",
        "--coordinator",
        "n7:61443",
        "--processes",
        "2",
        "--process",
    ]
    assert heard == [[*start, "0", *HARD], [*start, "1", *HARD]]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code", [1, 2, LOST, 137, 143])
def test_a_slurm_job_says_what_a_process_that_died_could_not(code, tmp_path):
    _, done = launched(tmp_path, "launch/slurm.sh", "--config", "x.py", code=code)
    died = "A process died (exit status 137): the same command resumes from the last checkpoint.\n"
    again = "queued again\n"
    said = {LOST: again, 137: died + again}.get(code, "")
    assert (done.returncode, done.stderr) == (code, said)


def test_every_host_of_a_gke_workload_hears_the_words_as_they_were_written(tmp_path):
    words = ("cluster", "name", "v5p-16", "an/image:1")
    heard, done = launched(tmp_path, "launch/xpk.sh", *words, *HARD)
    own = [str(tmp_path), "train", "--processes", "auto", *HARD]
    assert heard == [own, own] and done.returncode == 0, done.stderr


def test_a_pod_of_a_jobset_is_told_its_place(tmp_path):
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    name = jobset["metadata"]["name"]
    (job,) = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    (tmp_path / "rlhf-jax").write_text(PYTHON.format(python=sys.executable, code=0))
    (tmp_path / "rlhf-jax").chmod(0o755)
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    where, rest = place(json.loads(done.stdout)[1:])
    assert where == (f"{name}-{job['name']}-0-0.{name}:61440", pods["completions"], 3)
    assert pods["parallelism"] == pods["completions"]
    config = read(rest)
    assert config.mesh.slices == 4 and config.workdir.startswith("/shared")
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pods["template"]["spec"]["volumes"]}


KEY = "5ec2e7" * 10 + "abcd"
LAUNCHERS = {
    "local.sh": ("2",),
    "slurm.sh": (),
    "tpu.sh": ("name", "zone"),
    "xpk.sh": ("cluster", "name", "v5p-16", "an/image:1"),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_no_secret_is_on_a_command_line(name, tmp_path, monkeypatch):
    """Whoever is on a machine reads every command line: the key goes by environment or file."""
    monkeypatch.setenv("RLHF_JAX_KEY", KEY)
    launched(tmp_path, f"launch/{name}", *LAUNCHERS[name], "--config", "a.py")
    commands = (tmp_path / "commands").read_text()
    made = [path.read_text().strip() for path in tmp_path.rglob(".rlhf_jax_key")]
    assert "a.py" in commands and len(made) == (2 if name == "tpu.sh" else 0)
    assert not [key for key in (KEY, *made) if key in commands]


def test_every_launcher_is_looked_at_for_secrets():
    scripts = {path.name for path in (ROOT / "launch").glob("*.sh")}
    assert scripts == {*LAUNCHERS, "install.sh"}
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    keys = [one for one in container["env"] if "KEY" in one["name"]]
    assert keys and all("secretKeyRef" in one["valueFrom"] for one in keys)
    assert not [word for word in container["command"] + container["args"] if "KEY" in word]
    for text in (path.read_text() for path in (ROOT / "launch").iterdir() if path.is_file()):
        assert not re.search(r"\b[0-9a-f]{32,}\b", text), "a key that is written down is none"


def test_the_image_is_made_by_the_script_that_is_tested():
    steps = (ROOT / "launch" / "Dockerfile").read_text()
    assert "launch/install.sh /opt/rlhf_jax /src" in steps.replace("/src/launch", "launch")
    assert "launch/install.sh" in (ROOT / ".ci" / "run").read_text()
