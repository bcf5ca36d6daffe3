"""Describe concurrent training pipelines: their nodes, and the costs of their micro-batches.

The policy and the critic are two pipes that run over the same nodes in opposite directions, so that
each works in the bubbles of the other (RLHFuse, arXiv 2409.13221, section 5). A pipe may have
several copies, each on nodes of its own and with its share of the micro-batches. Times are in one
unit of the caller's choice, and so is memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

FORWARD = 0  # kinds of a task; a backward in two halves would be a third
BACKWARD = 1
RELATIVE_ERROR = 1e-9  # largest rounding error of sums of times or of memory


@dataclasses.dataclass(frozen=True)
class Pipe:
    """Describe one model that is cut into stages, and all copies of it."""

    nodes: tuple[tuple[int, ...], ...]  # [copies, stages] node of each
    micro_batches: int  # of each copy
    forward: tuple[float, ...]  # [stages] time of one micro-batch
    backward: tuple[float, ...]  # [stages]
    # [stages] memory of one micro-batch, from the start of its forward to the end of its backward
    kept: tuple[float, ...]

    @property
    def stages(self) -> int:
        """Return the stages of each copy."""
        return len(self.forward)


@dataclasses.dataclass(frozen=True)
class PipelineProblem:
    """Hold the pipes that share some nodes; raise ValueError if they cannot run."""

    pipes: tuple[Pipe, ...]
    limit: float | None = None  # memory of each node for activations; None: unlimited

    def __post_init__(self) -> None:
        if not self.pipes:
            raise ValueError("There is no pipe to schedule: give at least one.")
        for index, pipe in enumerate(self.pipes):
            _check_shape(index, pipe)
            most = max(pipe.kept)
            if self.limit is not None and not most <= self.limit * (1 + RELATIVE_ERROR):
                raise ValueError(
                    f"One micro-batch of pipe {index} keeps {most:g} on a node, above the limit of "
                    f"{self.limit:g}: raise the limit or make micro-batches smaller."
                )

    @property
    def nodes(self) -> int:
        """Return the number of nodes: one more than the largest that a pipe names."""
        return 1 + max(node for pipe in self.pipes for copy in pipe.nodes for node in copy)


def lay_copies(nodes: int, stages: int, *, opposed: bool) -> tuple[tuple[int, ...], ...]:
    """Return the nodes [copies, stages] of as many copies of a pipe as fill the nodes.

    opposed: the first stage of each copy is on its last node.
    """
    if stages < 1 or nodes % stages:
        raise ValueError(
            f"Copies of a pipe of {stages} stages do not fill {nodes} nodes: take a number of "
            f"stages that divides {nodes}."
        )
    ranges = [range(first, first + stages) for first in range(0, nodes, stages)]
    return tuple(tuple(reversed(own) if opposed else own) for own in ranges)


def _check_shape(index: int, pipe: Pipe) -> None:
    """Raise ValueError if a pipe's fields are inconsistent."""
    lengths = {len(pipe.backward), len(pipe.kept), *map(len, pipe.nodes)}
    if not pipe.stages or not pipe.nodes or lengths != {pipe.stages}:
        raise ValueError(
            f"Pipe {index} has {pipe.stages} forward times and {len(pipe.nodes)} copies: give at "
            "least one of each, and as many backward times, kept sizes and nodes of each copy."
        )
    every = list(itertools.chain.from_iterable(pipe.nodes))
    if len(set(every)) < len(every) or min(every) < 0:
        raise ValueError(f"Pipe {index} must have each of its stages on a node of its own, from 0.")
    timed = all(0 < seconds < math.inf for seconds in pipe.forward + pipe.backward)
    if pipe.micro_batches < 1 or not timed or not all(0 <= kept < math.inf for kept in pipe.kept):
        raise ValueError(
            f"Pipe {index} must have at least one micro-batch, times above 0, and no kept size "
            "below 0."
        )
