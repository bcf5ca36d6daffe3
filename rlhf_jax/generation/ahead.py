"""Prefetched samples: for the next step, from the weights before this step's update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_jax.data.prompts import Prompts
from rlhf_jax.generation.requests import Request, Sample
from rlhf_jax.monitoring.trace import Span


@dataclasses.dataclass(frozen=True)
class SamplesAhead:
    """Hold finished samples of a step that is not trained on yet."""

    samples: list[Sample]
    rows: np.ndarray  # [prompts] int64, the rows of their prompts
    drawn_at: int  # updates of the weights that generated them
    metrics: dict[str, float]  # of their generation
    # work of the slices, in seconds since the beginning by the clock of `time.perf_counter`
    began: float = 0.0
    spans: list[Span] = dataclasses.field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the content of a checkpoint: JSON values and numpy arrays, samples concatenated.

        Spans are left out: they belong to the step in which the samples were drawn.
        """
        samples = self.samples
        top_k = [top_k_ids for one in samples for top_k_ids in one.top_k_ids]
        return {
            "rows": np.array(self.rows, np.int64),
            "drawn_at": self.drawn_at,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "ids": np.array([one.sample_id for one in samples], np.int64),
            "lengths": np.array([len(one.tokens) for one in samples], np.int64),
            "tokens": np.concatenate([np.array(one.tokens, np.int32) for one in samples]),
            "logprobs": np.concatenate([np.array(one.logprobs, np.float32) for one in samples]),
            "support": np.array(top_k, np.int32) if top_k else None,
        }

    @classmethod
    def restore(
        cls, document: Mapping[str, Any], prompts: Prompts, max_new_tokens: int
    ) -> SamplesAhead:
        """Return the samples restored from `document`, for the same prompts."""
        rows = np.asarray(document["rows"])
        ids = np.asarray(document["ids"]).reshape(len(rows), -1)
        ends = np.cumsum(document["lengths"])[:-1]
        tokens = iter(np.split(np.asarray(document["tokens"], np.int32), ends))
        logprobs = iter(np.split(np.asarray(document["logprobs"], np.float32), ends))
        top_k_ids = document["support"]
        top_k_ids = [] if top_k_ids is None else np.split(np.asarray(top_k_ids, np.int32), ends)
        supports = iter(top_k_ids)
        samples = []
        for row, own in zip(rows.tolist(), ids.tolist(), strict=True):
            request = Request(prompts.tokens[row], tuple(own), max_new_tokens)
            samples += [
                Sample(
                    sample_id,
                    request,
                    [],
                    tokens=next(tokens).tolist(),
                    logprobs=next(logprobs).tolist(),
                    top_k_ids=list(next(supports, ())),
                    done=True,
                )
                for sample_id in own
            ]
        return cls(samples, rows, int(document["drawn_at"]), dict(document["metrics"]))
