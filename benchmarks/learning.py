"""What a rule of learning gains beside another, from one model; JSON, one line a run.

    python -m benchmarks.learning --case raft --seeds 0,1,2 >> learning.jsonl
    python -m benchmarks.learning --case dynamic --seeds 0,1,2,3,4 >> learning.jsonl

`raft`: the quickstart by GRPO, and by RAFT, which learns from the best of four samples of a prompt,
and from none if all are rewarded alike: of seven times as many prompts it learns from about as many
tokens, in as many updates. `dynamic`: GRPO on so few prompts that they
come again, with a fixed number of samples of each, and with fewer of those that the policy has
mastered. A line has what was measured on held-out prompts after each of some updates, with the
samples, generated and trained tokens and seconds up to there; seconds leave out evaluations,
compilation and start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import subprocess
import sys

from benchmarks.compare import circumstances

TRAIN = pathlib.Path("configs/data/people_train.jsonl")
REPEATED = 8  # prompts of `dynamic`, of which a step draws half
DYNAMIC = {
    "data.train": "{workdir}/prompts.jsonl",
    "steps": 6,
    "generation.prompts_per_step": REPEATED // 2,
    "generation.samples_per_prompt": 8,
    "generation.min_rows": 8,
    "evaluation.every": 2,
}
CASES = {
    "raft": {
        "grpo": {},
        "raft": {
            "algorithm.name": "raft",
            "generation.prompts_per_step": 56,
            "kl.coefficient": 0.0,
        },
    },
    "dynamic": {"fixed": DYNAMIC, "dynamic": DYNAMIC | {"generation.fewest_samples": 2}},
}
SECONDS = ("generation/seconds", "inference/seconds", "training/seconds")


def main() -> None:
    """Print a line for each seed and rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--seeds", default="0", help="with commas")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/learning"))
    asked, changes = parser.parse_known_args()
    asked.workdir.mkdir(parents=True, exist_ok=True)
    prompts = TRAIN.read_text().splitlines(keepends=True)[:REPEATED]
    (asked.workdir / "prompts.jsonl").write_text("".join(prompts))
    for seed, (rule, values) in itertools.product(
        map(int, asked.seeds.split(",")), CASES[asked.case].items()
    ):
        workdir = asked.workdir / asked.case / f"{rule}-{seed}"
        own = {"workdir": workdir, "seed": seed} | values
        words = [
            f"--config.{key}={value}".format(workdir=asked.workdir) for key, value in own.items()
        ]
        command = [sys.executable, "-m", "rlhf_jax.command", "train", "configs/quickstart.py"]
        subprocess.run([*command, *words, *changes], check=True, stdout=sys.stderr)
        document = {"case": asked.case, "seed": seed, "rule": rule, "changes": changes}
        print(json.dumps(document | {"measured": curve(workdir)} | circumstances()), flush=True)


def curve(workdir: pathlib.Path) -> list[dict[str, float]]:
    """Return the held-out measures of a run, each with what had been spent on it."""
    steps, evaluations, samples = (
        [json.loads(line) for line in (workdir / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "evaluations", "samples")
    )
    found = []
    for evaluation in evaluations:
        before = [step for step in steps if step["step"] < evaluation["step"]]
        found.append(
            {
                "step": evaluation["step"],
                **{key: x for key, x in evaluation.items() if isinstance(x, float)},
                "samples": sum(row["step"] < evaluation["step"] for row in samples),
                "generated tokens": sum(step["generation/tokens"] for step in before),
                "trained tokens": sum(step["training/tokens"] for step in before),
                "seconds": sum(step[key] for step in before for key in SECONDS),
            }
        )
    return found


if __name__ == "__main__":
    main()
