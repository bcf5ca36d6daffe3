"""Write preference.json: losses of pairs and their gradients, of TRL's own code in float64.

    python tests/golden/make_preference.py        # with trl 1.16.0, torch 2.13.0

dpo, robust, ipo and hinge are those of `DPOTrainer._compute_loss`, which is given a stub of a
model; cdpo and simpo of `CPOTrainer.cpo_loss`; orpo, which TRL computes in float32, kto and
Bradley-Terry are written in torch.
"""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import types

import torch
import torch.nn.functional as F
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer

PAIRS = 6
TOKENS = 9
BETA = 0.3
SMOOTHING = 0.1
MARGIN = 0.7
BASELINE = 0.2


def main() -> None:
    """Draw the numbers, and write what the losses make of them."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    lengths = torch.randint(2, TOKENS + 1, (2 * PAIRS,))
    mask = torch.arange(TOKENS)[None] < lengths[:, None]
    policy = torch.where(mask, -2.5 * torch.rand(2 * PAIRS, TOKENS) - 0.01, 0.0)
    reference = torch.where(mask, -2.5 * torch.rand(2 * PAIRS, TOKENS) - 0.01, 0.0)
    found = {}
    for name in ("dpo", "cdpo", "robust", "ipo", "hinge", "simpo", "orpo", "bradley_terry", "kto"):
        given = policy.clone().requires_grad_()
        loss = LOSSES.get(name, functools_of(name))(given, reference, mask)
        loss.backward()
        gradient = torch.where(mask, given.grad, 0.0)
        found[name] = {"loss": loss.item(), "gradient": gradient.tolist()}
    document = {
        "beta": BETA,
        "label_smoothing": SMOOTHING,
        "margin": MARGIN,
        "baseline": BASELINE,
        "mask": mask.tolist(),
        "policy": policy.tolist(),
        "reference": reference.tolist(),
        "losses": found,
    }
    path = pathlib.Path(__file__).with_name("preference.json")
    path.write_text(json.dumps(document) + "\n")


def functools_of(name: str):
    """Return a loss of `DPOTrainer`, by our name."""
    theirs = {"dpo": "sigmoid"}.get(name, name)

    def loss(policy, reference, mask):
        # the first token has no log-probability
        completion = F.pad(mask, (1, 0)).long()
        model = lambda **_: types.SimpleNamespace(log_probs=policy, loss=None)  # noqa: E731
        trainer = types.SimpleNamespace(
            model=types.SimpleNamespace(training=True),
            accelerator=types.SimpleNamespace(
                device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
            ),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[theirs],
            loss_weights=[1.0],
            beta=BETA,
            label_smoothing=SMOOTHING,
            use_weighting=False,
            args=types.SimpleNamespace(),
            _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
            _total_train_tokens=0,
        )
        chosen, rejected = reference.sum(1).chunk(2)
        inputs = {
            "input_ids": torch.zeros_like(completion),
            "attention_mask": torch.ones_like(completion),
            "completion_mask": completion,
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        }
        kept = []
        mean = torch.Tensor.mean

        def watched(self, *args, **kwargs):
            result = mean(self, *args, **kwargs)
            if self.requires_grad and self.shape == (PAIRS,) and not args and not kwargs:
                kept.append(result)
            return result

        torch.Tensor.mean = watched
        try:
            with contextlib.suppress(Exception):  # what follows the loss are metrics
                return DPOTrainer._compute_loss(trainer, model, inputs, False)
        finally:
            torch.Tensor.mean = mean
        return kept[0]

    return loss


def cpo(kind: str, smoothing: float):
    """Return a loss of `CPOTrainer`: of gains, or of means for simpo."""

    def loss(policy, reference, mask):
        trainer = types.SimpleNamespace(
            alpha=0.0,
            accelerator=types.SimpleNamespace(device="cpu"),
            loss_type=kind,
            simpo_gamma=MARGIN,
            beta=BETA,
            label_smoothing=smoothing,
        )
        sums = policy.sum(1) / mask.sum(1) if kind == "simpo" else (policy - reference).sum(1)
        losses, _, _ = CPOTrainer.cpo_loss(trainer, *sums.chunk(2))
        return losses.mean()

    return loss


def orpo(policy, reference, mask):
    """Return ORPO's loss, with the mean over a chosen answer's tokens as its likelihood."""
    del reference
    chosen, rejected = (policy.sum(1) / mask.sum(1)).chunk(2)
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return (-chosen - BETA * F.logsigmoid(odds)).mean()


def bradley_terry(policy, reference, mask):
    """Return the loss of rewards, for which the sums stand."""
    del reference, mask
    chosen, rejected = policy.sum(1).chunk(2)
    return -F.logsigmoid(chosen - rejected - MARGIN).mean()


def kto(policy, reference, mask):
    """Return KTO's loss of the first half as desirable answers and of the others, in torch.

    (`KTOTrainer` computes the same lines within a forward pass.) The baseline is a constant.
    """
    del mask
    desirable, undesirable = (policy - reference).sum(1).chunk(2)
    losses = torch.cat(
        (
            1 - torch.sigmoid(BETA * (desirable - BASELINE)),
            1 - torch.sigmoid(BETA * (BASELINE - undesirable)),
        )
    )
    return losses.mean()


LOSSES = {
    "kto": kto,
    "cdpo": cpo("sigmoid", SMOOTHING),
    "simpo": cpo("simpo", 0.0),
    "orpo": orpo,
    "bradley_terry": bradley_terry,
}

if __name__ == "__main__":
    main()
