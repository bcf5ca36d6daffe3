"""How much of what training and inference compute is padding: one JSON line a case.

    python benchmarks/padding.py --row-shards 8,64,512 --samples 16,4

Lengths are those of a table of percentiles (`--lengths`, benchmarks/tables by default), and
log-normal ones of median 4,000 and sigma 0.9, cut at 16,384. A prompt has `--prompt` tokens and
`--group` samples. A row shard holds at most `--tokens` tokens at a time, and at least the longest
sample. The useful share is that of tokens that are no padding, each prompt counted once for all of
its samples, of what is computed; that of attention is of pairs of tokens that see each other, of
those in the blocks that are computed. "before" are the rules that packing replaced: in training
rows of like length, each padded to a multiple of 64 above the longest beside it; in inference every
row padded to the longest that may be.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from rlhf_jax.models.attention import QUERY_BLOCK
from rlhf_jax.planner.response_lengths import LENGTHS_TABLE, draw_lengths, read_percentiles
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.packing import Extent, Packed, pack, padding_share

BUCKET = 64
MEDIAN = 4000.0
SIGMA = 0.9
CUT = 16_384


def main() -> None:
    """Print the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row-shards", default="8,64,512")
    parser.add_argument("--samples", default="16,4", help="of a row shard and minibatch")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--lengths", default=LENGTHS_TABLE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    percentiles = read_percentiles(options.lengths)
    for shards in map(int, options.row_shards.split(",")):
        for samples in map(int, options.samples.split(",")):
            count = shards * samples
            luck = np.random.default_rng(options.seed)
            drawn = {
                "table": draw_lengths(percentiles, count, luck),
                "log-normal": np.minimum(CUT, MEDIAN * np.exp(SIGMA * luck.normal(size=count))),
            }
            longest = {"table": int(percentiles.tokens[-1]), "log-normal": CUT}
            for name, lengths in drawn.items():
                case = {"lengths": name, "row_shards": shards, "samples": samples}
                shares = useful(lengths.astype(np.int64), longest[name], shards, options)
                print(json.dumps(case | shares), flush=True)


def useful(
    responses: np.ndarray, longest: int, shards: int, options: argparse.Namespace
) -> dict[str, float | int]:
    """Return useful shares of one minibatch's responses [n], and the micro-batches they make."""
    responses = np.maximum(responses, 1)
    batch = batch_of(responses, options.prompt, longest, options.group)
    slots = batch.tokens.shape[1]
    rows = shards * max(1, round(options.tokens / slots))
    prompts = -(-len(responses) // options.group)
    extent = Extent(
        rows,
        tokens=prompts * options.prompt + len(responses) * longest,
        group_tokens=options.prompt + options.group * longest,
        prompt_tokens=options.prompt,
    )
    packed = pack(batch, extent, QUERY_BLOCK, shards)
    needed = int(responses.sum()) + prompts * options.prompt
    # The last token of a sample is predicted and not read.
    read = needed - len(responses)
    whole = sum(part.batch.tokens.size for part in packed)
    attended = sum(map(attended_pairs, packed))
    seen = prompts * options.prompt**2 / 2 + (responses * (options.prompt + responses / 2)).sum()

    ordered = np.sort(responses + options.prompt)
    parts = np.split(ordered, range(rows, len(ordered), rows))
    in_training = sum(rows * -(-int(part[-1]) // BUCKET) * BUCKET for part in parts)
    return {
        "training": round(read / whole, 3),
        "inference": round(read / whole, 3),
        "training_before": round(needed / in_training, 3),
        "inference_before": round(needed / (len(responses) * slots), 3),
        "padding": round(padding_share(packed), 3),
        "attention": round(float(seen) / attended, 3),
        "micro_batches": len(packed),
        "shapes": len({part.batch.tokens.shape for part in packed}),
    }


def attended_pairs(part: Packed) -> int:
    """Count the pairs of tokens in the blocks of a micro-batch's lines that see each other."""
    pairs = part.batch.pairs
    blocks = -(-part.batch.tokens.shape[1] // QUERY_BLOCK)
    return int((pairs[..., 0] >= 0).sum()) * (part.batch.tokens.shape[1] // blocks) ** 2


def batch_of(responses: np.ndarray, prompt: int, longest: int, group: int) -> Sequences:
    """Return samples of these lengths, of which neighbours share a prompt."""
    count = len(responses)
    place = np.arange(prompt + longest)
    length = prompt + responses
    groups = np.arange(count, dtype=np.int32) // group
    tokens = np.zeros((count, len(place)), np.int32)
    tokens[:, :prompt] = groups[:, None]
    return Sequences(tokens, (place >= prompt) & (place < length[:, None]), groups)


if __name__ == "__main__":
    main()
