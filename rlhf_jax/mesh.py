"""Which devices hold what: four mesh axes, one table from logical axis names to them, and
`reshard`.

`data` repeats the weights, `fsdp` splits their width, `tensor` splits heads, feed-forward and
vocabulary. `slices` generate each on its own, with weights of its own, and split the width as
`fsdp` does in training. Rows of a batch lie over slices x data x fsdp, whatever the role.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import REFERENCE, Kernels

AXES: tuple[str, ...] = ("slices", "data", "fsdp", "tensor")
ROW_AXES = ("slices", "data", "fsdp")

# Each weight once: its logical axes. A stacked layer has a leading L, which is never split.
WEIGHT_AXES = {
    "embed": ("vocab", "width"),
    "attention_norm": ("norm",),
    "query": ("width", "heads", "head_dim"),
    "key": ("width", "kv_heads", "head_dim"),
    "value": ("width", "kv_heads", "head_dim"),
    "output": ("heads", "head_dim", "width"),
    "mlp_norm": ("norm",),
    "gate": ("width", "ffn"),
    "up": ("width", "ffn"),
    "down": ("ffn", "width"),
    "query_bias": ("heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "head_dim"),
    "query_norm": ("norm",),
    "key_norm": ("norm",),
    "norm": ("norm",),
    "head": ("width", "vocab"),
}

_TENSOR = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor"}

# The table: logical axis -> mesh axes, by role. What is not named is not split.
ROLES = {"training": _TENSOR | {"width": ("slices", "fsdp")}, "generation": _TENSOR}

AnyMesh = Mesh | AbstractMesh
FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Say where and how a call runs: on which devices, by which kernels, in which dtype.

    It is static: hashable, so that a jitted function may take it as a static argument.
    """

    # None: one device, whichever the arguments are on
    mesh: Mesh | None = None
    kernels: Kernels = REFERENCE
    # of the products; sums and log-probs are float32 all the same
    dtype: np.dtype = FLOAT32

    @property
    def slices(self) -> int:
        """Count the parts of the mesh that generate each on its own."""
        return 1 if self.mesh is None else self.mesh.shape["slices"]


def count_devices() -> int:
    """The number of devices; ValueError where JAX cannot use the platform that it was asked for."""
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:
        # AssertionError where a platform is known but not installed
        reason = (str(error).splitlines() or ["it is not installed"])[0].rstrip(".")
        raise ValueError(
            f"JAX cannot use the platform {jax.config.values['jax_platforms']!r} ({reason});"
            " install JAX for it,"
            " or change JAX_PLATFORMS."
        ) from error


def sizes(data: int, fsdp: int, tensor: int, num_devices: int, slices: int = 1) -> dict[str, int]:
    """Mesh sizes by axis, with -1 resolved to the devices that the other axes leave.

    Raises ValueError where the product is not the number of devices.
    """
    wanted = dict(zip(AXES, (slices, data, fsdp, tensor), strict=True))
    text = ", ".join(f"{name}={size}" for name, size in wanted.items())
    rest = [name for name, size in wanted.items() if size == -1]
    if len(rest) > 1 or any(size < 1 and size != -1 for size in wanted.values()):
        raise ValueError(
            f"mesh {text}: sizes must be positive, and at most one may be -1 (the rest)."
        )
    known = int(np.prod([size for size in wanted.values() if size != -1]))
    if rest and num_devices % known == 0:
        wanted[rest[0]] = num_devices // known
    elif rest or known != num_devices:
        raise ValueError(
            f"mesh {text} does not fit {num_devices} devices; choose sizes whose product is"
            f" {num_devices}."
        )
    return wanted


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Any = None, slices: int = 1
) -> Mesh:
    """A mesh of axes (slices, data, fsdp, tensor) over `devices` (default: all); -1 takes the rest.

    Processes share the slices evenly: each has slices of its own, or a slice is several processes'
    own. Raises ValueError where the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = tuple(sizes(data, fsdp, tensor, len(devices), slices).values())
    ranks = sorted({device.process_index for device in devices})
    slice_groups = min(shape[0], len(ranks))
    size = len(ranks) // slice_groups
    parts = [
        [device for device in devices if ranks.index(device.process_index) // size == slice_group]
        for slice_group in range(slice_groups)
    ]
    own = (shape[0] // slice_groups, *shape[1:])
    return (
        _joined([_make(own, part) for part in parts]) if slice_groups > 1 else _make(own, devices)
    )


def _make(shape: tuple[int, ...], devices: list) -> Mesh:
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def _joined(meshes: list[Mesh]) -> Mesh:
    """One mesh of the slices of several."""
    return Mesh(
        np.concatenate([mesh.devices for mesh in meshes]),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def abstract_mesh(shape: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, for planning: shardings on it know their shard shapes."""
    return AbstractMesh(tuple(shape[name] for name in AXES), AXES)


def split(mesh: Mesh) -> list[Mesh]:
    """The slices of a mesh, each a mesh of its own with the same axes."""
    types = (AxisType.Auto,) * len(AXES)
    return [
        Mesh(mesh.devices[i : i + 1], AXES, axis_types=types) for i in range(mesh.shape["slices"])
    ]


def owners(mesh: Mesh) -> tuple[int, ...]:
    """The processes that its devices belong to, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_here(mesh: Mesh) -> bool:
    """Whether some of its devices belong to this process."""
    return jax.process_index() in owners(mesh)


def on_slice(tree: Any, mesh: Mesh) -> Any:
    """What the devices of one slice hold of a tree that is repeated over slices, as arrays on that
    slice: no copy.
    """
    devices = set(mesh.devices.flat)

    def part(leaf: jax.Array) -> jax.Array:
        place = NamedSharding(mesh, leaf.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
        shards = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(leaf.shape, place, shards)

    return jax.tree.map(part, tree)


def row_shards(mesh: AnyMesh | None) -> int:
    """The parts that the rows of a batch are split into."""
    return 1 if mesh is None else _extent(ROW_AXES, mesh)


def model_shardings(tree: Any, mesh: AnyMesh, role: str) -> Any:
    """A sharding for every leaf of a tree of `Model`s: a model, its gradient, an optax state, a
    `TrainState`.

    Leaves are arrays or `ShapeDtypeStruct`s. A weight is known by its field name; leaves of other
    names (counts, steps) are replicated. role: "training" (split over slices, fsdp and tensor) or
    "generation" (split over tensor, repeated over the rest). A dimension that its axis does not
    divide stays whole: see `unsplit`.
    """

    def shard(path, leaf) -> NamedSharding:
        return NamedSharding(mesh, fitting(_weight_spec(path, leaf, role), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(shard, tree)


def row_shardings(tree: Any, mesh: AnyMesh) -> Any:
    """A sharding for every leaf of a row-first tree: [B, ...] over slices x data x fsdp.

    Leaves of rank 4 are caches, [B, G, ...], whose G lies over tensor as the weights' key-value
    heads do. Scalars are replicated. What its axes do not divide stays whole.
    """

    def shard(leaf) -> NamedSharding:
        return NamedSharding(mesh, fitting(row_spec(leaf.ndim), leaf.shape, mesh))

    return jax.tree.map(shard, tree)


def place_rows(tree: Any, mesh: Mesh | None) -> Any:
    """A row-first tree on the devices: laid over the mesh, or on the default device where there is
    none.

    Over the devices of several processes, each places its parts of host arrays that all have alike.
    """
    if mesh is None or not mesh.is_multi_process:
        return jax.device_put(tree, None if mesh is None else row_shardings(tree, mesh))
    return jax.tree.map(_place_parts, tree, row_shardings(tree, mesh))


def _place_parts(leaf: np.ndarray, place: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, place, lambda index: np.asarray(leaf)[index])


def pin_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Inside a jitted function: hold a row-first result to its layout, as the next call will find
    it.
    """
    return (
        tree if mesh is None else jax.lax.with_sharding_constraint(tree, row_shardings(tree, mesh))
    )


@functools.partial(jax.jit, static_argnames=("mesh",))
def repeat(tree: Any, mesh: Mesh) -> Any:
    """A tree whole on every device of a mesh."""
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def unsplit(tree: Any, mesh: AnyMesh, role: str) -> list[str]:
    """One line for each dimension that stays whole because its mesh axis does not divide it."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        wanted = _weight_spec(path, leaf, role)
        for size, axes, kept in zip(
            leaf.shape, wanted, fitting(wanted, leaf.shape, mesh), strict=True
        ):
            if axes is not None and kept is None:
                lines.append(
                    f"{jax.tree_util.keystr(path)}: {size} is not divisible by"
                    f" {axes}={_extent(axes, mesh)}"
                )
    return lines


def reshard(tree: Any, shardings: Any, donate: bool = False) -> Any:
    """`tree` laid out as `shardings` say, in one transfer.

    With `donate` the source must lie on the same devices; it goes leaf by leaf and is deleted
    behind the copy, so that old and new are never alive together: the peak is one leaf more.
    """
    return jax.tree.map(_hand_over, tree, shardings) if donate else jax.device_put(tree, shardings)


def _hand_over(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """`device_put(donate=True)` keeps a source whose shards change shape, and may share buffers
    with it.
    """
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    moved = jax.jit(_identity, out_shardings=sharding)(leaf)
    leaf.delete()
    return moved


def _identity(leaf: jax.Array) -> jax.Array:
    return leaf


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes that the fullest device holds of a tree of arrays or `ShapeDtypeStruct`s under
    `shardings`.
    """
    held = jax.tree.map(
        lambda x, s: int(np.prod(s.shard_shape(x.shape))) * x.dtype.itemsize, tree, shardings
    )
    return sum(jax.tree.leaves(held))


def _weight_spec(path, leaf, role: str) -> tuple:
    axes = WEIGHT_AXES.get(_field(path), ())
    if len(axes) > leaf.ndim:
        raise ValueError(
            f"{jax.tree_util.keystr(path)} has rank {leaf.ndim}; a weight of that name has axes"
            f" {axes}."
        )
    split = [ROLES[role].get(name) for name in axes]
    return (None,) * (leaf.ndim - len(axes)) + tuple(split)


def _field(path) -> str:
    return getattr(path[-1], "name", "") if path else ""


def row_spec(rank: int) -> tuple:
    """The mesh axes of each dimension of a row-first leaf; one of rank 4 is a cache, [B, G,
    ...].
    """
    spec = (ROW_AXES, "tensor" if rank == 4 else None)
    return (spec + (None,) * rank)[:rank]


def fitting(spec: tuple, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """`spec` without the axes that do not divide their dimension."""
    kept = [
        axes if axes and size % _extent(axes, mesh) == 0 else None
        for size, axes in zip(shape, spec, strict=True)
    ]
    return PartitionSpec(*kept)


def _extent(axes: str | tuple[str, ...], mesh: AnyMesh) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return int(np.prod([mesh.shape[name] for name in names]))
