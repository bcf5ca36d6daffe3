"""FLOPs of a function against hand formulas, and against the compiler where nothing loops."""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_programs import Target, micro_batch
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from shipped_configs import LLAMA_8B, TWO_LAYERS

from rlhf_jax.algorithms.grpo import POLICY_LOSS
from rlhf_jax.config import default
from rlhf_jax.inference.scoring import score_packed
from rlhf_jax.mesh import ONE_DEVICE, make_mesh
from rlhf_jax.models import transformer
from rlhf_jax.models.attention import packed_block
from rlhf_jax.models.flops import count_flops
from rlhf_jax.models.packed import padding_flops
from rlhf_jax.planner.shapes import pairs_of_texts
from rlhf_jax.sequences.batch import Sequences
from rlhf_jax.sequences.packing import Extent, pack
from rlhf_jax.training.gradients import accumulate
from rlhf_jax.training.settings import TrainingSettings
from rlhf_jax.types import ModelConfig, ModelConfigs

SQUARE = jax.ShapeDtypeStruct((16, 16), jnp.float32)
PRODUCT = 2 * 16**3


def weights_of_layers(model: ModelConfig) -> int:
    """Numbers of the matrices of all layers."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return model.num_layers * model.width * (heads + 3 * model.ffn_width)


def attention(model: ModelConfig, rows: int, tokens: int) -> int:
    """FLOPs of scores and sums over all pairs of a row's tokens, in all layers."""
    return 4 * model.num_layers * model.num_heads * model.head_dim * rows * tokens**2


def shapes(model: ModelConfig):
    return jax.eval_shape(lambda: transformer.init(jax.random.key(0), model))


def hidden_sum(model, tokens, remat: bool = False):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return transformer.forward(model, tokens, positions, remat=remat)[0].sum()


def tokens_of(rows: int, tokens: int):
    return jax.ShapeDtypeStruct((rows, tokens), jnp.int32)


def test_a_forward_pass_is_the_formulas():
    found = count_flops(hidden_sum, shapes(TWO_LAYERS), tokens_of(3, 64))
    formula = 2 * 3 * 64 * weights_of_layers(TWO_LAYERS) + attention(TWO_LAYERS, 3, 64)
    assert found == formula


@pytest.mark.parametrize("remat", [False, True])
def test_a_gradient_is_three_passes_and_with_remat_the_layers_once_more(remat):
    """Without remat products with weights are kept, and attention is computed again; with it the
    last product of a layer is not needed again.
    """
    gradient = jax.grad(functools.partial(hidden_sum, remat=remat))
    found = count_flops(gradient, shapes(TWO_LAYERS), tokens_of(3, 64))
    products = 2 * 3 * 64 * weights_of_layers(TWO_LAYERS)
    down = 2 * 3 * 64 * TWO_LAYERS.num_layers * TWO_LAYERS.width * TWO_LAYERS.ffn_width
    attended = attention(TWO_LAYERS, 3, 64)
    again = products - down if remat else 0
    assert abs(found / (3 * products + again + 4 * attended) - 1) < 0.02


def test_an_unrolled_model_has_the_compilers_flops():
    """But for its few per cent of FLOPs that are in no matrix product."""
    model = dataclasses.replace(TWO_LAYERS, width=512, ffn_width=4096)
    unrolled = jax.eval_shape(
        lambda: transformer.unstack(transformer.init(jax.random.key(0), model))
    )
    gradient = jax.jit(jax.grad(hidden_sum))
    compiled = gradient.lower(unrolled, tokens_of(2, 64)).compile()
    said = compiled.cost_analysis()
    assert said is not None
    found = count_flops(gradient, unrolled, tokens_of(2, 64))
    assert abs(found / said["flops"] - 1) < 0.02


def test_loops_count_by_their_turns_and_branches_by_the_largest():
    def step(carry, _):
        return jax.lax.scan(lambda x, _: (x @ x, None), carry, None, length=5)[0], None

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    def unknown(x):
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)

    assert count_flops(lambda x: jax.lax.scan(step, x, None, length=7)[0], SQUARE) == 35 * PRODUCT
    assert (
        count_flops(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x @ x, x), SQUARE) == 4 * PRODUCT
    )
    assert count_flops(branch, SQUARE) == 2 * PRODUCT
    assert count_flops(unknown, SQUARE) == PRODUCT


def test_what_is_called_counts_too():
    @jax.custom_vjp
    def squared(x):
        return x @ x

    squared.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert count_flops(jax.jit(jax.checkpoint(squared)), SQUARE) == PRODUCT
    assert count_flops(jax.grad(lambda x: squared(x).sum()), SQUARE) == 3 * PRODUCT


def test_a_kernel_counts_at_every_point_of_its_grid():
    def kernel(x, out):
        out[...] = x[...] @ x[...]

    block = pl.BlockSpec((16, 16), lambda i, j: (0, 0))
    call = pl.pallas_call(kernel, out_shape=SQUARE, grid=(2, 3), in_specs=[block], out_specs=block)
    assert count_flops(call, SQUARE) == 6 * PRODUCT


def test_each_device_of_a_mesh_counts():
    rows = PartitionSpec("fsdp")
    whole = PartitionSpec()
    mesh = make_mesh(fsdp=8)
    by_rows = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    repeated = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    assert count_flops(by_rows, SQUARE, SQUARE) == PRODUCT
    assert count_flops(repeated, SQUARE, SQUARE) == 8 * PRODUCT


def test_padding_is_counted_in_products_of_a_forward_pass():
    """Of prompts that are needed once, pairs of tokens that see each other, and predicted ones."""
    random = np.random.default_rng(0)
    prompts, responses = [40, 40, 40, 25], [70, 9, 300, 130]
    batch = sequences_of(prompts, responses, random)
    packed = pack(batch, Extent(1), packed_block(ONE_DEVICE), row_shards=1)
    assert len(packed) > 1
    of_layers = 2 * weights_of_layers(TWO_LAYERS)
    of_head = 2 * TWO_LAYERS.width * TWO_LAYERS.vocab_size
    own = [answer - 1 for answer in responses]  # the last token is predicted, and not read
    pairs = sum(n * prompt + n * (n + 1) // 2 for n, prompt in zip(own, prompts, strict=True))
    pairs += 40 * 41 // 2 + 25 * 26 // 2
    by_hand = of_layers * (sum(own) + 40 + 25) + of_head * sum(responses)
    by_hand += attention(TWO_LAYERS, 1, 1) * pairs

    def computed(part) -> int:
        """As the program says: a head of whole blocks, of which the CPU leaves out those without
        predicted tokens.
        """
        run = functools.partial(score_packed, temperature=1.0, chunk=64)
        turns = int((part.batch.pairs[..., 0] >= 0).sum())
        flops = count_flops(run, shapes(TWO_LAYERS), part.batch, turns=turns)
        length = part.batch.tokens.shape[1]
        blocks = -(-length // 64)
        size = -(-length // blocks)
        skipped = sum(
            not part.batch.mask[0, n * size : (n + 1) * size].any() for n in range(blocks)
        )
        return flops - of_head * skipped * size

    share = padding_flops(packed, TWO_LAYERS, ONE_DEVICE, chunk=64)
    assert share == pytest.approx(1 - by_hand / sum(map(computed, packed)), abs=1e-4)
    assert 0.05 < share < 0.6


def sequences_of(prompts, responses, random) -> Sequences:
    """Samples of these lengths; prompts of one length are one prompt."""
    slots = max(map(sum, zip(prompts, responses, strict=True)))
    tokens = random.integers(0, TWO_LAYERS.vocab_size, (len(prompts), slots)).astype(np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens[row, :prompt] = prompt
        mask[row, prompt : prompt + response] = True
    return Sequences(tokens, mask, np.array(prompts, np.int32))


def test_a_gradient_of_8b_is_counted_in_about_a_second():
    config = default()
    config.data.max_prompt_tokens = 512
    config.generation.max_new_tokens = 512
    config.training.microbatch_rows = 2
    batch = jax.eval_shape(lambda: micro_batch(Target(config, ModelConfigs(LLAMA_8B), ONE_DEVICE)))
    settings = TrainingSettings(microbatch_rows=2, remat=True)
    gradient = functools.partial(accumulate, None, loss=POLICY_LOSS, settings=settings)
    began = time.perf_counter()
    turns = pairs_of_texts(config, ONE_DEVICE, 2)
    found = count_flops(gradient, shapes(LLAMA_8B), batch, turns=turns)
    assert time.perf_counter() - began < 10, "a second or two on a machine that does nothing else"
    layers = 2 * 2048 * weights_of_layers(LLAMA_8B)
    down = 2 * 2048 * LLAMA_8B.num_layers * LLAMA_8B.width * LLAMA_8B.ffn_width
    head = 2 * 2048 * LLAMA_8B.width * LLAMA_8B.vocab_size
    # blocks of 128 see themselves and what is before them; the layer comes twice, and the backward
    # pass has five products for two
    attended = (1 + 1 / 8) / 2 * attention(LLAMA_8B, 2, 1024)
    assert abs(found / (4 * (layers + head) - down + 4.5 * attended) - 1) < 0.02
