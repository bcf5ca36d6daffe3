"""One-pass reward modelling: a linear reward that learns from each label once and keeps none.

The model is Bradley and Terry's on fixed features: the first of two answers is better with
probability sigmoid(theta . z), where z is the difference of their features (arXiv 2502.07193). A
label costs O(d^2), whatever their number. The inverse of the accumulated Hessian also says how
certain a reward is, by which answers are chosen.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

CG_ABOVE = 4096  # features from which a matrix of them is too large to keep
CG_STEPS = 3
LABEL_CHOICES = ("active", "deployment", "random")
OPTIMISM = 1.0  # beta of the choice in deployment


def sigmoid(x: np.ndarray | float) -> np.ndarray:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


@dataclasses.dataclass
class OnePassReward:
    """Hold theta [d] and the inverse Hessian [d, d] (float64), which `learn` changes in place.

    The update is implicit online mirror descent with a quadratic surrogate (Algorithm 1), in its
    exact form of rank one; the projection onto a ball is left out, as in the paper's experiments.
    Of the Hessian, whose inverse is symmetric, the upper triangle alone is kept up to date.
    """

    theta: np.ndarray
    inverse: np.ndarray  # in Fortran order
    rate: float  # eta
    total: np.ndarray  # [d], the sum of all iterates
    labels: int = 0  # learned from so far

    @classmethod
    def begin(
        cls,
        features: int,
        regularizer: float = 1.0,
        rate: float = 1.0,
        theta: np.ndarray | None = None,
    ) -> OnePassReward:
        """Return the model of no label, whose Hessian is `regularizer` times the identity.

        theta: [d], to start from; zeros by default. Above CG_ABOVE features no matrix is kept, and
        only `cg_step` learns.
        """
        if regularizer <= 0 or rate <= 0:
            raise ValueError(f"regularizer is {regularizer} and rate {rate}; give numbers above 0.")
        kept = features if features <= CG_ABOVE else 0
        start = np.zeros(features) if theta is None else np.array(theta, np.float64)
        inverse = np.asfortranarray(np.eye(kept) / regularizer)
        return cls(start, inverse, rate, start.copy())

    def state(self) -> dict[str, np.ndarray]:
        """Return all of it as arrays for a checkpoint."""
        return {
            "theta": self.theta.copy(),
            "inverse": self.inverse[np.triu_indices(len(self.inverse))],
            "rate": np.array(self.rate),
            "total": self.total.copy(),
            "labels": np.array(self.labels),
        }

    @classmethod
    def restored(cls, state: Mapping[str, np.ndarray]) -> OnePassReward:
        """Return what `state` saved; it shares nothing with it."""
        upper = np.asarray(state["inverse"])
        kept = (math.isqrt(8 * len(upper) + 1) - 1) // 2
        inverse = np.zeros((kept, kept), order="F")
        inverse[np.triu_indices(kept)] = upper
        return cls(
            np.array(state["theta"], np.float64),
            inverse,
            float(state["rate"]),
            np.array(state["total"], np.float64),
            int(state["labels"]),
        )

    def learn(self, differences: np.ndarray, labels: np.ndarray) -> None:
        """Learn from labels in their order: differences [n, d], labels [n] of 1 or 0.

        A label is 1 where the first answer is better. Raises ValueError where
        these do not fit each other, and then learns nothing.
        """
        blas: Any = importlib.import_module("scipy.linalg.blas")  # takes half a second
        if not len(self.inverse):
            raise ValueError(
                f"There are {len(self.theta)} features; above {CG_ABOVE} no matrix of them is kept:"
                " use cg_step."
            )
        differences = np.asarray(differences, np.float64)
        if differences.shape != (len(labels), len(self.theta)):
            raise ValueError(
                f"Differences of shape {differences.shape} do not fit {len(labels)} labels and"
                f" {len(self.theta)} features; give one row for each label."
            )
        if not (np.isfinite(differences).all() and np.isin(labels, (0, 1)).all()):
            raise ValueError("A feature is not finite, or a label not 0 or 1; leave the pair out.")
        for z, label in zip(differences, np.asarray(labels, np.float64), strict=True):
            u = blas.dsymv(1.0, self.inverse, z)
            spread = float(z @ u)
            chance = float(sigmoid(z @ self.theta))
            curvature = chance * (1.0 - chance)
            step = self.rate * (chance - label) / (1.0 + self.rate * curvature * spread)
            self.theta -= step * u
            # the Hessian is taken at the new iterate
            chance = float(sigmoid(z @ self.theta))
            curvature = chance * (1.0 - chance)
            shrink = -curvature / (1.0 + curvature * spread)
            self.inverse = blas.dsyr(shrink, u, a=self.inverse, overwrite_a=True)
            self.total += self.theta
            self.labels += 1

    @property
    def average(self) -> np.ndarray:
        """Return the mean of all iterates, the first one included: [d]."""
        return self.total / (1 + self.labels)

    def rewards(self, features: np.ndarray) -> np.ndarray:
        """Return the rewards of answers by their features [n, d]: [n]."""
        return np.asarray(features, np.float64) @ self.theta

    def uncertainty(self, features: np.ndarray) -> np.ndarray:
        """Return |x| in the norm of the inverse Hessian for features or differences [n, d]: [n]."""
        blas: Any = importlib.import_module("scipy.linalg.blas")
        x = np.asarray(features, np.float64)
        u = blas.dsymm(1.0, self.inverse, x.T).T  # the lower triangle is never read
        return np.sqrt(np.maximum(np.einsum("nd,nd->n", u, x), 0.0))

    def choose_passive(self, features: np.ndarray, beta: float) -> int:
        """Choose an answer by its reward less beta times its uncertainty: pessimism."""
        return int(np.argmax(self.rewards(features) - beta * self.uncertainty(features)))

    def choose_active(self, differences: np.ndarray) -> int:
        """Choose the pair to be labelled next: the one with the largest uncertainty."""
        return int(np.argmax(self.uncertainty(differences)))

    def choose_deployment(self, features: np.ndarray, beta: float) -> tuple[int, int]:
        """Choose the best answer, and one that may be better still; both are shown to a person."""
        rewards = self.rewards(features)
        best = int(np.argmax(rewards))
        apart = self.uncertainty(np.asarray(features) - np.asarray(features)[best])
        return best, int(np.argmax(rewards + 2.0 * beta * apart))

    def choose_pair(
        self, features: np.ndarray, choice: str, random: np.random.Generator
    ) -> tuple[int, int]:
        """Choose which two of a prompt's answers, with these features [n, d], are labelled.

        choice: one of LABEL_CHOICES; `random` breaks ties.
        """
        first, second = random.permutation(len(features))[:2].tolist()
        if choice == "active":
            places = np.array(np.triu_indices(len(features), 1)).T
            differences = features[places[:, 0]] - features[places[:, 1]]
            first, second = places[self.choose_active(differences)].tolist()
        elif choice == "deployment":
            best, other = self.choose_deployment(features, OPTIMISM)
            if other != best:
                second = other
            elif second == best:  # none may be better: any other
                second = first
            first = best
        return first, second


def begun(theta: np.ndarray, features: np.ndarray) -> OnePassReward:
    """Return the reward theta [d] before any label, for answers with features such as [n, d].

    It is about as uncertain as the features vary: by a unit of reward.
    """
    spread = float(features.var(axis=0).sum()) if len(features) else 0.0
    return OnePassReward.begin(len(theta), spread or 1.0, theta=theta)


def cg_step(
    theta: np.ndarray,
    differences: np.ndarray,
    labels: np.ndarray,
    *,
    rate: float,
    damping: float,
    steps: int = CG_STEPS,
) -> np.ndarray:
    """Return theta [d] after a batch, by conjugate gradients: (H + damping I) v = g (Algorithm 5).

    H is the batch's mean Hessian, of which only products are computed; `damping` stands for all
    earlier ones.
    """
    z = np.asarray(differences, np.float64)
    chance = sigmoid(z @ theta)
    gradient = z.T @ (chance - labels) / len(z)
    weight = chance * (1.0 - chance) / len(z)
    found = np.zeros_like(gradient)
    residual = gradient.copy()
    direction = residual.copy()
    square = float(residual @ residual)
    for _ in range(steps):
        if square == 0.0:
            break
        product = z.T @ (weight * (z @ direction)) + damping * direction
        length = square / float(direction @ product)
        found += length * direction
        residual -= length * product
        last = square
        square = float(residual @ residual)
        direction = residual + square / last * direction
    return theta - rate * found
