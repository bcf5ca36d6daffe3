"""Do the runs of a workflow one after the other, each on what those before it left.

    rlhf-jax workflow [CONFIG] [--workdir DIR] [--stages A,B] [--config.any.key=value]
        [--STAGE.any.key=value]

CONFIG is a Python file, or the name of one that comes with the package, with `STAGES`, names in
order, and `get_config(WORKDIR)`, the config of the stage that lives in WORKDIR, which is DIR/STAGE.
A stage is an ordinary run: `rlhf-jax train CONFIG:DIR/STAGE`. What is done is skipped, and what was
stopped goes on. --stages names those to do, if not all. --config.... is for all stages, --STAGE....
for one. DIR/report.html shows the samples and measures of all models beside each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from rlhf_jax.config import command_line
from rlhf_jax.config.earlier import defaults_of
from rlhf_jax.config.identity import binding_settings
from rlhf_jax.config.schema import Config, flat
from rlhf_jax.report.workflow import RECORD, write_workflow
from rlhf_jax.runtime.extensions import is_of_file
from rlhf_jax.runtime.files import find, is_remote, write_atomically
from rlhf_jax.runtime.foreign import one_line
from rlhf_jax.setup.validation import check_values


class StageRun(NamedTuple):
    """Hold a stage of a workflow, which is an ordinary run."""

    name: str
    workdir: pathlib.Path
    config: Config
    arguments: list[str]  # of `rlhf-jax train`

    @property
    def paths(self) -> dict[str, str]:
        """Return the local files and folders that the config names, by key."""
        values = flat(self.config)
        paths = {}
        for key in command_line.PATH_KEYS:
            several = values[key] if isinstance(values[key], (list, tuple)) else [values[key]]
            for index, spec in enumerate(several):
                path = spec.rpartition(":")[0] if is_of_file(spec) else spec
                if path and not is_remote(path):
                    paths[f"{key}[{index}]" if len(several) > 1 else key] = path
        return paths


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or that of the run that failed or was stopped."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("error: stopped by the keyboard; the same command resumes.", file=sys.stderr)
        return 130


def _main(argv: list[str]) -> int:
    """Read the command line, and run the stages in order."""
    parser = argparse.ArgumentParser(
        prog=argv[0],
        usage=f"{argv[0]} [CONFIG] [--workdir DIR] [--stages A,B] [--config.KEY=VALUE]"
        " [--STAGE.KEY=VALUE]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", default="workflow", metavar="CONFIG", help="a file with STAGES"
    )
    parser.add_argument("--workdir", help="of the workflow; runs/CONFIG without it", metavar="DIR")
    parser.add_argument("--stages", help="those to do; all without it", metavar="A,B")
    options, changes = parser.parse_known_args(argv[1:])
    folder = options.workdir or f"runs/{pathlib.PurePath(options.config).stem}"
    if ":" in folder:  # `train CONFIG:DIR/STAGE` is split at its last colon
        raise ValueError(
            f"--workdir is {folder}; a workflow lives in a folder of this machine, without a colon."
        )
    workdir = pathlib.Path(folder).expanduser()
    stages = {stage.name: stage for stage in read_stages(options.config, workdir, changes)}
    wanted = options.stages.split(",") if options.stages is not None else stages
    if unknown := [name for name in wanted if name not in stages]:
        raise ValueError(f"--stages: {unknown[0]!r} is none of {', '.join(stages)}.")
    chosen = [name for name in stages if name in wanted]
    for number, name in enumerate(chosen, start=1):
        if code := run_stage(stages[name], f"{number} of {len(chosen)}"):
            return code
    records = {name: workdir / name / RECORD for name in stages}
    done = [name for name, file in records.items() if file.exists() and _read_record(file)["done"]]
    report = write_workflow(workdir, done)
    print(f"The report of the workflow is {report}.")
    return 0


def read_stages(spec: str, workdir: pathlib.Path, changes: Sequence[str]) -> list[StageRun]:
    """Return the stages that a config file names, checked as far as that needs no device.

    changes: `--config.key=value`, and `--STAGE.key=value` for one of them. Raises ValueError or
    FileNotFoundError in one sentence.
    """
    path = find(spec if spec.endswith(".py") else f"configs/{spec}.py")
    if not path.is_file():
        raise FileNotFoundError(f"There is no config file {spec}; give a file with STAGES.")
    names = _names(path)
    known = ("config", *names)
    for change in changes:
        fits = re.fullmatch(r"--([\w-]+)\.[\w.]+=.*", change, re.DOTALL)
        if not fits or fits[1] not in known:
            places = ", ".join(f"--{name}.KEY=VALUE" for name in known)
            raise ValueError(f"{change!r} is none of {places}.")
    stages = []
    for name in names:
        of_stage = [
            f"--config.{change[2:].partition('.')[2]}"
            for change in changes
            if change[2:].partition(".")[0] in ("config", name)
        ]
        stage_dir = workdir / name
        arguments = ["--config", f"{spec}:{stage_dir}", *of_stage]
        config = command_line.read(["rlhf-jax train", *arguments])
        if pathlib.Path(config.workdir) != stage_dir:
            raise ValueError(
                f"The stage {name!r} of {path} lives in {config.workdir}; get_config() must put it"
                f" in the folder that it is given, {stage_dir}."
            )
        if config.dry_run:
            raise ValueError(
                f"dry_run is set; check a stage by rlhf-jax train {' '.join(arguments)}, whose"
                " earlier stages are done."
            )
        try:
            check_values(config)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{name}: {error}") from error
        stages.append(StageRun(name, stage_dir, config, arguments))
    _check_order(stages, workdir)
    return stages


def _names(path: pathlib.Path) -> tuple[str, ...]:
    """Return the names of the stages of a config file; ValueError where there are none."""
    try:
        names = runpy.run_path(str(path)).get("STAGES")
    except (Exception, SystemExit) as error:  # a config file is Python and may raise anything
        raise ValueError(f"{path} fails: {type(error).__name__}: {one_line(error)}.") from error
    if names is None:
        raise ValueError(f"{path} names no STAGES; rlhf-jax train does a single run.")
    plain = isinstance(names, (tuple, list)) and all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w-]*", name) and name != "config"
        for name in names
    )
    if not plain or not names or len(set(names)) < len(names):
        raise ValueError(
            f"{path}: STAGES is {names!r:.80}; it must be a tuple of different names of letters,"
            " digits, '_' and '-', none of them 'config'."
        )
    return tuple(names)


def _check_order(stages: Sequence[StageRun], workdir: pathlib.Path) -> None:
    """Check that each stage names folders of earlier ones, and other files that are there."""
    names = [stage.name for stage in stages]
    root = os.path.abspath(workdir)
    for number, stage in enumerate(stages):
        for key, named in stage.paths.items():
            path = pathlib.Path(os.path.abspath(named))
            if path.is_relative_to(root):
                other = (*path.relative_to(root).parts, "")[0]
                if other in names[number:]:
                    raise ValueError(
                        f"{stage.name}: {key} is {named}, which the stage {other!r} makes later or"
                        " itself; name the folder of an earlier stage."
                    )
                if other not in names:
                    raise ValueError(f"{stage.name}: {key} is {named}, which no stage makes.")
            elif path.suffix in (".py", ".jsonl", ".parquet") and not find(named).is_file():
                raise FileNotFoundError(f"{stage.name}: {key}: there is no file {named}.")


def run_stage(stage: StageRun, position: str) -> int:
    """Do the run of a stage unless it is done; return its exit code, as a shell gives it.

    position: of the stage among all, as "1 of 3", to be printed. The stage's folder keeps a record:
    its identity, whether it is done, its seconds over all attempts, and the model folders it left.
    Raises ValueError where the folder was made with another config, other data or other models.
    """
    record_file = stage.workdir / RECORD
    identity = _identity(stage)
    record: dict[str, Any] = {"identity": identity, "done": False, "seconds": 0.0}
    if record_file.is_file():
        earlier = _read_record(record_file)
        record["seconds"] = earlier["seconds"]
        # A stage whose models were removed is run again.
        record["done"] = earlier["done"] and all(
            (stage.workdir / name).exists() for name in earlier["left"]
        )
        if earlier["done"]:  # a run that goes on compares its checkpoints itself
            _check_same(stage, earlier["identity"], identity)
    if record["done"]:
        print(f"Stage {position}, {stage.name}, is done: {stage.workdir}.")
        return 0
    stage.workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(record_file, json.dumps(record, indent=1).encode())
    print(f"Stage {position}, {stage.name}: rlhf-jax train {' '.join(stage.arguments)}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "rlhf_jax.command", "train", *stage.arguments]
    code = _run(command)
    record["seconds"] += time.monotonic() - began
    record["done"] = code == 0
    record["left"] = sorted(path.parent.name for path in stage.workdir.glob("*/config.json"))
    write_atomically(record_file, json.dumps(record, indent=1).encode())
    return code if code >= 0 else 128 - code  # negative: the signal that ended the run


def _read_record(file: pathlib.Path) -> dict[str, Any]:
    """Return the record of a stage; ValueError where the file holds none."""
    try:
        record = json.loads(file.read_text())
        return {key: record[key] for key in ("identity", "done", "seconds")} | {
            "left": record.get("left", [])
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged ({one_line(error)}); remove it, and the stage is checked anew."
        ) from error


def _run(command: list[str]) -> int:
    """Return the exit code of a run, which gets the signals that would end this process."""
    runs: list[subprocess.Popen] = []
    early: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:  # the keyboard's reaches both
            early.append(number)
            for process in runs:
                process.send_signal(number)

    before = {
        number: signal.signal(number, hand_on)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        process = subprocess.Popen(command)  # noqa: S603  # this package
        runs.append(process)
        for number in early:  # that came before there was a run
            process.send_signal(number)
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _identity(stage: StageRun) -> dict[str, Any]:
    """Return the identity of a stage: config, code, and digests of the files that it reads."""
    settings = {
        key: value
        for key, value in binding_settings(stage.config).items()
        if key not in command_line.PATH_KEYS
    }
    identity: dict[str, Any] = {}
    for key, value in settings.items():
        # of code by its file's name alone, so that a workflow may be moved; two may have one name
        name = re.sub(r"^the code of .*/", "the code of ", key)
        identity[name] = f"{identity[name]} {value}" if name in identity else value
    identity["steps"] = stage.config.steps
    values = flat(stage.config)
    identity |= {key: values[key] for key in command_line.PATH_KEYS if is_remote(str(values[key]))}
    contents = {key: _digest(find(path)) for key, path in stage.paths.items()}
    identity |= {f"the content of {key}": digest for key, digest in contents.items()}
    return json.loads(json.dumps(identity, default=str))  # as `_read_record` will return it


def _digest(path: pathlib.Path) -> str:
    """Return 16 hexadecimal digits of a file's or folder's content; its name where it is none."""
    if not path.exists():
        return str(path)
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as content:
                of_file = hashlib.file_digest(content, "sha256").digest()
            digest.update(f"{file.relative_to(path)} ".encode() + of_file)
    return digest.hexdigest()[:16]


def _check_same(stage: StageRun, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise ValueError where the identity of a stage is not that of its folder.

    A key that the version of the folder lacked had its default.
    """
    defaults = defaults_of(new["algorithm.name"])
    old = {key: defaults[key] for key in new if key in defaults} | old
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if keys:
        changes = ", ".join(
            f"{key} ({old.get(key)!r:.40}, now {new.get(key)!r:.40})" for key in keys[:3]
        )
        raise ValueError(
            f"{stage.workdir} was made otherwise: {changes}{' and more' * (len(keys) > 3)}. Restore"
            " what has changed, remove that folder and those of later stages, or name another"
            " --workdir."
        )
