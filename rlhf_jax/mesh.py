"""Define the layout of arrays: four mesh axes, and a table from axes of weights to them.

`data` repeats the weights, `fsdp` splits their width, `tensor` splits heads, feed-forward and
vocabulary. `slices` generate independently, each with its own weights, and split the width as
`fsdp` does in training; in a pipeline each holds some layers, and a part of the rest, and `data` is
the number of copies. Rows of a batch are split over slices x data x fsdp; those of a pipeline over
data x fsdp.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import DEFAULT_KERNELS, Kernels
from rlhf_jax.runtime.shards import place_parts

AXES: tuple[str, ...] = ("slices", "data", "fsdp", "tensor")
ROW_AXES = ("slices", "data", "fsdp")
AXIS_TYPES = (AxisType.Auto,) * len(AXES)

_TENSOR = dict.fromkeys("VHGF", "tensor")

# From the axis of a weight, by its letter in `types.py`, to mesh axes, by role. Unnamed axes are
# not split.
ROLES = {
    "training": _TENSOR | {"M": ("slices", "fsdp")},
    "generation": _TENSOR,
    "pipelined": _TENSOR | {"M": "fsdp", "L": "slices"},
}

T = TypeVar("T")

AnyMesh = Mesh | AbstractMesh
FLOAT32 = np.dtype(np.float32)


class OwnSpecs(abc.ABC):
    """Mark a part of a row-first tree that defines its own sharding, beyond its rows."""

    @abc.abstractmethod
    def specs(self) -> Any:
        """Return the mesh axes of each dimension of each leaf, a tuple in the leaf's place."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Define where and how a call runs: devices, role, kernels and dtype.

    It is static: hashable, so that a jitted function may take it as a static argument.
    """

    # None: one device, that of the arguments; an abstract mesh is for planning
    mesh: AnyMesh | None = None
    # the row of `ROLES` that defines how weights are split
    role: str = "training"
    kernels: Kernels = DEFAULT_KERNELS
    # of matrix products; sums and log-probs are always float32
    dtype: np.dtype = FLOAT32
    # the kind of decoding's key-value caches, a name in `cache.state.CACHE_KINDS`
    cache: str = "contiguous"

    @functools.cached_property
    def slices(self) -> int:
        """Count the parts of the mesh that generate independently."""
        return self.extent("slices")

    @functools.cached_property
    def row_shards(self) -> int:
        """Count the parts into which the rows of a batch are split; in a pipeline, per slice."""
        return self.extent(ROW_AXES[1:] if self.role == "pipelined" else ROW_AXES)

    @property
    def devices(self) -> np.ndarray:
        """Return the devices [slices, data, fsdp, tensor] of a mesh that is not abstract."""
        assert isinstance(self.mesh, Mesh), "Only a mesh of real devices has them."
        return self.mesh.devices

    @property
    def platform(self) -> str:
        """Return the platform of its devices, "cpu", "gpu" or "tpu"; '' if unknown.

        The devices may be absent: a trace for a layout reads the platform here, not from this
        process.
        """
        if self.mesh is None:
            return jax.default_backend()
        if isinstance(self.mesh, Mesh):
            return self.devices.flat[0].platform
        return getattr(self.mesh.abstract_device, "platform", "")

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the ranks of the processes that own its devices, in order."""
        if not isinstance(self.mesh, Mesh):
            return (jax.process_index(),)
        return tuple(sorted({device.process_index for device in self.devices.flat}))

    @property
    def is_here(self) -> bool:
        """Return whether some of its devices belong to this process."""
        return jax.process_index() in self.owners

    @property
    def is_shared(self) -> bool:
        """Return whether its devices belong to several processes."""
        return isinstance(self.mesh, Mesh) and self.mesh.is_multi_process

    @property
    def unpipelined(self) -> Layout:
        """Return the layout of models trained on all slices together while others are pipelined."""
        return dataclasses.replace(self, role="training") if self.role == "pipelined" else self

    def extent(self, axes: str | tuple[str, ...]) -> int:
        """Return the number of parts into which mesh axes split a dimension."""
        if self.mesh is None:
            return 1
        names = (axes,) if isinstance(axes, str) else axes
        return math.prod(self.mesh.shape[name] for name in names)

    def split(self, axis: str = "slices") -> list[Layout]:
        """Return the layout of each slice, or part of an axis, on a mesh with the same axes."""
        if self.extent(axis) == 1:
            return [self]
        parts = np.split(self.devices, self.extent(axis), axis=AXES.index(axis))
        meshes = [Mesh(part, AXES, axis_types=AXIS_TYPES) for part in parts]
        return [dataclasses.replace(self, mesh=mesh) for mesh in meshes]

    def fit(self, spec: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Return `spec` without the mesh axes that do not divide their dimension of `shape`."""
        kept = [
            axes if axes and size % self.extent(axes) == 0 else None
            for size, axes in zip(shape, spec, strict=True)
        ]
        return PartitionSpec(*kept)


# The default: the default device, plain jax and float32.
ONE_DEVICE = Layout()


def sizes(data: int, fsdp: int, tensor: int, num_devices: int, slices: int = 1) -> dict[str, int]:
    """Return mesh sizes by axis, with -1 resolved to the remaining devices.

    Raises ValueError if the product is not the number of devices.
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
        hints = (
            f", as by mesh.{name}=-1"
            for name in ("fsdp", "data", "slices", "tensor")
            if -1 not in wanted.values() and num_devices % (known // wanted[name]) == 0
        )
        raise ValueError(
            f"mesh {text} does not fit {num_devices} devices; choose sizes whose product is"
            f" {num_devices}{next(hints, '')}."
        )
    return wanted


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Any = None, slices: int = 1
) -> Mesh:
    """Make a mesh of axes (slices, data, fsdp, tensor) over `devices`; a size of -1: the rest.

    devices: all if None. Processes share the slices evenly: each process has whole slices, or a
    slice belongs to several processes. Raises ValueError if the product of the sizes is not the
    number of devices, or if a TPU's devices do not form a box.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = tuple(sizes(data, fsdp, tensor, len(devices), slices).values())
    ranks = sorted({device.process_index for device in devices})
    slice_groups = min(shape[0], len(ranks))
    group_ranks = len(ranks) // slice_groups
    group_shape = (shape[0] // slice_groups, *shape[1:])
    parts = []
    for group in range(slice_groups):
        of_group = ranks[group * group_ranks : (group + 1) * group_ranks]
        group_devices = [device for device in devices if device.process_index in of_group]
        # a TPU's axes may be split: tensor=2 in a slice of 4x4x4 chips takes half of one
        try:
            torus = mesh_utils.create_device_mesh(
                group_shape, group_devices, allow_split_physical_axes=True
            )
        except AssertionError as error:
            ends = f"{group_devices[0].id} to {group_devices[-1].id}"
            raise ValueError(
                f"TPUs {ends} are no box of their torus, as a program's must be; give a call half"
                " of the chips, a quarter ... or three quarters of whole planes."
            ) from error
        parts.append(torus)
    return Mesh(np.concatenate(parts), AXES, axis_types=AXIS_TYPES)


def abstract_mesh(shape: dict[str, int], platform: str = "") -> AbstractMesh:
    """Make a mesh without devices, to plan for a platform; its shardings have shard shapes."""
    device = AbstractDevice(platform, None, platform) if platform else None
    return AbstractMesh(tuple(shape[name] for name in AXES), AXES, abstract_device=device)


def on_slice(tree: T, layout: Layout) -> T:
    """Return the part of a tree over all slices that one slice holds, as arrays on that slice.

    layout: the slice's own. The arrays share their buffers with the tree's. Arrays repeated over
    slices stay whole; of arrays split over them the slice's part is returned. Shapes give shapes.
    """
    devices = set(layout.devices.flat)

    def part(leaf: Any) -> Any:
        """Regroup the buffers of one leaf that lie on the slice."""
        spec = leaf.sharding.spec
        split = [layout.extent(axes or ()) for axes in (*spec, *[None] * leaf.ndim)]
        held = leaf.sharding.shard_shape(leaf.shape)
        shape = tuple(map(operator.mul, held, split))
        place = named(layout, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=shape, sharding=place)
        shards = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(shape, place, shards, dtype=leaf.dtype)

    return jax.tree.map(part, tree)


def row_shardings(tree: Any, layout: Layout) -> Any:
    """Return a sharding for every leaf of a row-first tree: [B, ...] over slices x data x fsdp.

    Scalars are replicated. A dimension that its axes do not divide stays whole. A part that is
    `OwnSpecs` defines the sharding of its leaves.
    """

    def shard(part: Any) -> Any:
        """Return the sharding of one leaf, or of a part that defines its own."""
        if isinstance(part, OwnSpecs):
            return jax.tree.map(lambda x, spec: fitted(layout, spec, x.shape), part, part.specs())
        return fitted(layout, row_spec(part.ndim), part.shape)

    return jax.tree.map(shard, tree, is_leaf=lambda part: isinstance(part, OwnSpecs))


def rows_of_shard(rows: int, row_shards: int) -> int:
    """Return the rows of a micro-batch per row shard, equal for all and at least one.

    The remainder comes with a later micro-batch.
    """
    return max(1, rows // row_shards)


def place_rows(tree: Any, layout: Layout) -> Any:
    """Place a row-first tree [B, ...] on the mesh, or on the default device without a mesh.

    Over the devices of several processes, each places its parts of host arrays that all have alike.
    """
    if layout.mesh is None:
        return jax.device_put(tree)
    shardings = row_shardings(tree, layout)
    if layout.owners == (jax.process_index(),):
        return jax.device_put(tree, shardings)
    return jax.tree.map(place_parts, tree, shardings)


def on_each(
    run: Callable[..., T], layout: Layout, in_specs: Any, out_specs: Any
) -> Callable[..., T]:
    """Return `run` applied to each device's own part of its arguments.

    Replication is not checked, since a kernel does not declare the axes over which its results
    vary. Unsplit results must be equal on all devices that hold them.
    """
    return jax.shard_map(
        run, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def for_all_to_read(layout: Layout) -> NamedSharding:
    """Return a sharding for numbers that every process reads: all devices of a layout.

    If these do not include all processes, it is all devices of the run.
    """
    mesh = layout.mesh
    if len(layout.owners) < jax.process_count():
        mesh = Mesh(np.array(jax.devices()), ("devices",))
    assert mesh is not None, "One device needs no sharding."
    return NamedSharding(mesh, PartitionSpec())


def pin_rows(tree: T, layout: Layout) -> T:
    """Constrain a row-first result [B, ...] to its layout, inside a jitted function.

    The next call then gets it as `place_rows` would have placed it. Without a mesh it does nothing.
    """
    if layout.mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, row_shardings(tree, layout))


@functools.partial(jax.jit, static_argnames=("layout",))
def repeat(tree: T, layout: Layout) -> T:
    """Replicate a tree on every device of a mesh."""
    return jax.lax.with_sharding_constraint(tree, named(layout, PartitionSpec()))


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Return the bytes of a tree under `shardings` on the fullest device.

    Leaves are arrays or `ShapeDtypeStruct`s.
    """
    held = jax.tree.map(
        lambda leaf, sharding: int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize,
        tree,
        shardings,
    )
    return sum(jax.tree.leaves(held))


def row_spec(rank: int) -> tuple:
    """Return the mesh axes of each dimension of a row-first leaf: its rows are split."""
    return (ROW_AXES, *(None,) * rank)[:rank]


def fitted(layout: Layout, spec: tuple, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of a leaf by mesh axes of its dimensions, where they divide these."""
    return named(layout, layout.fit(spec, shape))


def named(layout: Layout, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of a leaf whose dimensions are split by `spec`."""
    assert layout.mesh is not None, "Only a mesh splits anything."
    return NamedSharding(layout.mesh, spec)
