"""Collectives of compiled programs: hand-written HLO in all spellings, and bytes that are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.mesh import make_mesh
from rlhf_jax.planner.search.collectives import find_collectives, group_size, shape_bytes

pytestmark = pytest.mark.usefixtures("compiled_well")

HEADER = "HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8\n"


def received(text: str | None) -> dict[str, float]:
    """Bytes that a device receives, by kind of collective."""
    assert text is not None
    found: dict[str, float] = {}
    for one in find_collectives(text):
        found[one.kind] = found.get(one.kind, 0.0) + one.received
    return found


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", 2),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", 1),
        ("replica_groups={}, to_apply=%add", 8),
        ("replica_groups=[2,4]<=[8], dimensions={1}", 4),
        ("replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true", 4),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}", 4),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 4),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
        ("channel_id=1, source_target_pairs={{0,1},{1,0}}", 2),
        ("channel_id=1, source_target_pairs={{0,0},{1,1}}", 1),
    ],
)
def test_groups_are_read_in_all_spellings(attributes, size):
    assert group_size(f"%x.1), channel_id=3, {attributes}", devices=8) == size


def test_shapes_have_bytes():
    assert shape_bytes("f32[3,4]{1,0}") == 48
    assert shape_bytes("(bf16[8]{0:T(8,128)(2,1)}, pred[3], /*index=2*/s4[4], u32[])") == 25
    assert shape_bytes("f8e4m3fn[16]") == 16


KINDS = (
    HEADER
    + """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %g = f32[64]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %r = f32[16]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %s = f32[4]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %a = (f32[8]{0}, f32[8]{0}) all-to-all(%p, %p), replica_groups=[4,2]<=[8]
  ROOT %c = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
"""
)


def test_each_kind_costs_what_a_ring_sends():
    assert received(KINDS) == {
        "all-gather": 256 * 3 / 4,
        "all-reduce": 2 * 64 / 2,
        "reduce-scatter": 16 * 3,
        "all-to-all": 64 / 2,
        "collective-permute": 64,
    }


ASYNC = (
    HEADER
    + """
%wrapped (q: f32[16]) -> f32[4] {
  %q = f32[16]{0} parameter(0)
  ROOT %s = f32[4]{0} reduce-scatter(%q), replica_groups=[2,4]<=[8], dimensions={0}
}

%all-reduce-scatter.1 (i: f32[16]) -> f32[4] {
  %i = f32[16]{0} parameter(0)
  %w = f32[16]{0} all-reduce(%i), replica_groups=[2,4]<=[8]
  ROOT %d = f32[4]{0} slice(%w), slice={[0:4]}
}

ENTRY %main (p: f32[16]) -> f32[64] {
  %p = f32[16]{0} parameter(0)
  %b = (f32[16], f32[64]) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %m = (f32[16], f32[16], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}
  %o = f32[16]{0} collective-permute-done(%m)
  %t = ((f32[16]{0}), f32[4]{0}) async-start(%p), calls=%wrapped
  %u = f32[4]{0} async-done(%t), calls=%wrapped
  %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %e = f32[64]{0} all-gather-done(%b)
}
"""
)


def test_a_start_and_its_end_are_one_and_fusions_count_as_what_they_do():
    assert received(ASYNC) == {
        "all-gather": 256 * 3 / 4,
        "collective-permute": 64,
        "reduce-scatter": 2 * 16 * 3,
    }


LOOPS = (
    HEADER
    + """
%condition (s: (s32[], f32[16])) -> pred[] {
  %s = (s32[], f32[16]) parameter(0)
  %n = s32[] constant(6)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%inner (s: (s32[], f32[16])) -> (s32[], f32[16]) {
  %s = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[16] get-tuple-element(%s), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %r = f32[16]{0} all-to-all(%x), replica_groups=[1,8]<=[8]
  ROOT %out = (s32[], f32[16]) tuple(%next, %r)
}

%outer (s: (s32[], f32[16])) -> (s32[], f32[16]) {
  %s = (s32[], f32[16]) parameter(0)
  ROOT %w = (s32[], f32[16]) while(%s), condition=%condition, body=%inner
}

%few (s: (s32[], f32[16])) -> (s32[], f32[16]) {
  %s = (s32[], f32[16]) parameter(0)
  %x = f32[16] get-tuple-element(%s), index=1
  %r = f32[16] collective-permute(%x), source_target_pairs={{0,1}}
  ROOT %out = (s32[], f32[16]) tuple(%s, %r)
}

ENTRY %main (s: (s32[], f32[16])) -> (s32[], f32[16]) {
  %s = (s32[], f32[16]) parameter(0)
  %w = (s32[], f32[16]) while(%s), condition=%any, body=%outer, x={"known_trip_count":{"n":"5"}}
  ROOT %c = (s32[], f32[16]) conditional(%p, %w, %w), branch_computations={%few, %outer}
}
"""
)


def test_loops_multiply_with_or_without_a_note_and_the_larger_branch_counts():
    """Five turns of three, as the counter rises by two to six; and three in the branch."""
    assert received(LOOPS) == {"all-to-all": (5 * 3 + 3) * 64 * 7 / 8}


def test_layers_gathered_in_a_scan_receive_their_weights():
    mesh = make_mesh(fsdp=4, tensor=2)
    weights = jax.ShapeDtypeStruct(
        (5, 64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    )
    rows = jax.ShapeDtypeStruct(
        (16, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )

    def run(weights, rows):
        step = jax.shard_map(
            lambda x, w: x @ jax.lax.all_gather(w, "fsdp", tiled=True),
            mesh=mesh,
            in_specs=(PartitionSpec("fsdp"), PartitionSpec("fsdp")),
            out_specs=PartitionSpec("fsdp"),
        )
        return jax.lax.scan(lambda x, w: (step(x, w), None), rows, weights)[0]

    text = jax.jit(run).lower(weights, rows).compile().as_text()
    assert received(text) == {"all-gather": 5 * 64 * 64 * 4 * 3 / 4}


def test_a_product_split_by_its_inputs_is_summed_over_its_group():
    mesh = make_mesh(data=2, fsdp=1, tensor=4)

    def placed(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    left = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=placed("data", "tensor"))
    right = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=placed("tensor", None))
    product = jax.jit(jnp.matmul, out_shardings=placed("data", None))
    text = product.lower(left, right).compile().as_text()
    assert received(text) == {"all-reduce": 2 * 16 * 16 * 4 * 3 / 4}
