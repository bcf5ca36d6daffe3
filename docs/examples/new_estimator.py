"""Add an advantage estimator: each sample is compared with the median of its prompt's others.

    python docs/examples/new_estimator.py

A config selects it: config.algorithm.estimator = "docs/examples/new_estimator.py:ESTIMATOR"
"""

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.losses.advantages import Estimator, EstimatorConfig, of_samples
from rlhf_jax.training.experience import AdvantageConfig, compute_advantages


def leave_one_out_median(rewards: jax.Array, samples_per_prompt: int) -> jax.Array:
    """Compute A_i = r_i - the median of the other rewards of its group: [B] -> [B] float32."""
    groups = rewards.reshape(-1, samples_per_prompt)
    others = [jnp.delete(groups, i, axis=1) for i in range(samples_per_prompt)]
    medians = jnp.stack([jnp.median(part, axis=1) for part in others], axis=1)
    return (groups - medians).reshape(-1)


ESTIMATOR = Estimator("leave_one_out_median", of_samples(leave_one_out_median), compares_group=True)

if __name__ == "__main__":
    rewards = np.array([0, 1, 1, 5], np.float32)  # of four samples of one prompt
    mask = np.ones((4, 3), bool)  # three tokens each, all of the response
    logprobs = np.zeros((4, 3), np.float32)  # those of the reference, so there is no KL penalty
    config = AdvantageConfig(f"{__file__}:ESTIMATOR", EstimatorConfig(samples_per_prompt=4))
    _, advantages, _, _ = compute_advantages(
        rewards, np.ones(4, bool), mask, logprobs, logprobs, None, np.float32(0), config
    )
    print(np.asarray(advantages[:, 0]).tolist())  # [-1.0, 0.0, 0.0, 4.0]
