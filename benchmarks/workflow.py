r"""A workflow of some seeds: seconds, measures and win rates of each stage; JSON, one line a seed.

    python benchmarks/workflow.py --seeds 0,1,2 >> benchmarks/results/workflow.jsonl
    python benchmarks/workflow.py --config configs/online.py --workdir runs/online \
        --from runs/seeds --keep sft,reward_model,grpo \
        --stages sft,reward_model,grpo,online_dpo >> benchmarks/results/online.jsonl

Each seed is a run of `rlhf-jax workflow` in WORKDIR/SEED, as a stranger starts it; a seed that is
done is read again. With `--from` its first stages are copied from FROM/SEED. Of each model that was
measured by what it writes the document has the means, the words, and how often its answers beat
those of the model before it, with an interval of 95 % over prompts. Beside a reward model that
learned from pairs stands a logistic regression of their words (TF-IDF). Seconds are those of the
runs, with their compilation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import runpy
import shutil
import subprocess
import sys

import numpy as np

from benchmarks.compare import circumstances
from rlhf_jax.report.run import RunRecord, read_run
from rlhf_jax.report.workflow import RECORD, TEXT_COLUMNS, comparable, win_rate, written
from rlhf_jax.runtime.extensions import load_named
from rlhf_jax.runtime.files import find

SAMPLES = 10  # of each model that are shown
STEP_MEASURES = ("kl/mean", "reward/mean", "preference/accuracy", "training/tokens")


def main() -> None:
    """Print the document of each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/workflow.py", help="a file with STAGES")
    parser.add_argument("--seeds", default="0", help="with commas")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/seeds"))
    parser.add_argument("--from", dest="begun", type=pathlib.Path, help="of stages that are done")
    parser.add_argument("--stages", help="those to do, with commas; all without it")
    parser.add_argument("--keep", default="", help="the stages that are copied from there")
    asked, changes = parser.parse_known_args()
    for seed in map(int, asked.seeds.split(",")):
        workdir = asked.workdir / str(seed)
        for stage in filter(None, asked.keep.split(",")):
            if not (workdir / stage).exists():
                copy(asked.begun / str(seed) / stage, workdir / stage)
        command = [sys.executable, "-m", "rlhf_jax.command", "workflow", asked.config]
        words = [f"--workdir={workdir}", f"--config.seed={seed}", *changes]
        words += [f"--stages={asked.stages}"] if asked.stages else []
        subprocess.run(command + words, check=True, stdout=sys.stderr)
        done = asked.stages and asked.stages.split(",")
        document = {"seed": seed, "changes": changes} | describe(asked.config, workdir, done)
        print(json.dumps(document), flush=True)


def copy(done: pathlib.Path, folder: pathlib.Path) -> None:
    """Copy a stage that is done, whose config names the folders of its new place."""
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("checkpoints"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace(str(done.parent), str(folder.parent)))


def describe(config: str, workdir: pathlib.Path, done: list[str] | None = None) -> dict:
    """The document of a finished workflow, or of those of its stages that were done."""
    stages = done or runpy.run_path(str(find(config)))["STAGES"]
    runs = {name: read_run(workdir / name) for name in stages}
    models = comparable(written(workdir, runs), list(runs.values()))
    return {
        "config": config,
        "stages": {
            name: {
                "seconds": json.loads((workdir / name / RECORD).read_text())["seconds"],
                "evaluations": [
                    {key: value for key, value in row.items() if not key.endswith("seconds")}
                    for row in run.evaluations
                ],
                "last step": {
                    key: run.metrics[-1][key] for key in STEP_MEASURES if key in run.metrics[-1]
                }
                if run.metrics
                else {},
                **words_alone(run),
            }
            for name, run in runs.items()
        },
        "models": {
            name: {key: mean_of(rows, key) for key in numbers_of(rows)}
            | {"words": float(np.mean([len(row["response"].split()) for row in rows]))}
            for name, rows in models.items()
        },
        "wins": {
            f"{later} over {earlier}": {
                key: rate._asdict()
                for key in numbers_of(models[later])
                if (rate := win_rate(models[earlier], models[later], key))
            }
            for earlier, later in itertools.combinations(models, 2)
        },
        "samples": {
            name: [row["prompt"] + " -> " + row["response"] for row in rows[:SAMPLES]]
            for name, rows in models.items()
        },
        **circumstances(),
    }


def words_alone(run: RunRecord) -> dict[str, float]:
    """The share of held-out pairs that words of a reward model's own pairs put right."""
    if run.config["algorithm.name"] != "reward_model":
        return {}
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10.0)
    )
    pairs, held_out = (load_named(run.config[key], key)() for key in ("data.train", "data.eval"))
    model.fit([row[name] for row in pairs for name in ("chosen", "rejected")], [1, 0] * len(pairs))
    chosen, rejected = (
        model.decision_function([row[name] for row in held_out]) for name in ("chosen", "rejected")
    )
    return {"logistic regression on the same pairs": float(np.mean(chosen > rejected))}


def numbers_of(rows: list[dict]) -> list[str]:
    return [key for key in rows[0] if key not in TEXT_COLUMNS]


def mean_of(rows: list[dict], key: str) -> float:
    return float(np.mean([row[key] for row in rows if row[key] is not None]))


if __name__ == "__main__":
    main()
