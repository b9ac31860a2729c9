"""Where vLLM's KV caches lie, found out from shapes and strides.

Each layer's cache is one tensor, perhaps a view into an allocation that others share. What a block is made of must be
consecutive in memory, once (keys and values together, or a latent) or twice (keys and values apart). Everything else is
refused by name: a layout that is guessed wrong would be read as wrong tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import ConfigError

DTYPES = {
    "torch.float32": "f32",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "f8_e4m3",
    "torch.float8_e5m2": "f8_e5m2",
    "torch.uint8": "u8",
}


@dataclass(frozen=True)
class Shape:
    """A tensor as the finding needs it: no torch, so that it can be tested without."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    itemsize: int
    address: int
    """Of the first element."""


@dataclass(frozen=True)
class Spec:
    """What vLLM says of a layer's cache."""

    block_tokens: int
    heads: int
    dtype: str
    heads_total: int = 0
    """Heads of the layer over all tensor-parallel ranks; 0: as many as this rank has."""


@dataclass(frozen=True)
class Area:
    """One region: block `i` is at `address + i * stride`, `bytes` long."""

    kind: str
    address: int
    stride: int
    bytes: int
    head_size: int
    order: str


def areas(layer: str, shape: Shape, spec: Spec, blocks: int) -> list[Area]:
    """The regions of one layer's tensor. Raises ConfigError with shape and strides if it is not understood."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"KV cache of layer {layer}: {why} (shape {list(shape.sizes)}, strides {list(shape.strides)}, "
            f"{blocks} blocks of {spec.block_tokens} tokens, {spec.heads} heads)"
        )

    axis = _block_axis(shape, blocks)
    if axis is None:
        raise refuse(f"no dimension has the size {blocks}, the number of blocks")
    stride = shape.strides[axis]
    inner, halves = [], []
    for index, (size, step) in enumerate(zip(shape.sizes, shape.strides, strict=True)):
        if index == axis or size == 1:
            continue
        if index < axis:
            halves.append((size, step))
        else:
            inner.append((size, step))
    # From the outermost to the innermost, each must begin where the next inner ones end.
    span = 1
    for size, step in sorted(inner, key=lambda dim: dim[1]):
        if step != span:
            raise refuse("the elements of a block are not consecutive in memory")
        span *= size
    if span > stride:
        raise refuse("blocks overlap")
    if any(size != 2 for size, _ in halves):
        raise refuse("a dimension outside of the blocks is neither the blocks nor keys and values")
    if not halves and _has_halves_inside(shape, axis):
        # Keys of the whole block, then its values: apart, each with the stride of both.
        span //= 2
        halves = [(2, span)]
    per_head, rest = divmod(span, spec.block_tokens * spec.heads)
    if rest or per_head == 0:
        raise refuse(f"the {span} elements of a block are not a whole number for each head and token")
    if not _has_rows(shape, axis, spec, per_head):
        raise refuse("the elements of one head of one token are not consecutive in memory")
    order = _order(shape, axis, spec)
    if order is None:
        raise refuse("heads and tokens cannot be told apart")
    kinds = ("key", "value") if halves else ("key_value",)
    return [
        Area(
            kind=kind,
            address=shape.address + index * (halves[0][1] if halves else 0) * shape.itemsize,
            stride=stride * shape.itemsize,
            bytes=span * shape.itemsize,
            head_size=per_head,
            order=order,
        )
        for index, kind in enumerate(kinds)
    ]


def _has_rows(shape: Shape, axis: int, spec: Spec, per_head: int) -> bool:
    """Whether one head of one token is one row, so that a peer with other ranks can be given single heads."""
    dims = zip(shape.sizes[axis + 1 :], shape.strides[axis + 1 :], strict=True)
    steps = [step for size, step in dims if step > 1 and size in (spec.heads, spec.block_tokens)]
    return not steps or min(steps) == per_head or per_head == 1


def _has_halves_inside(shape: Shape, axis: int) -> bool:
    """Whether keys and values are the outermost dimension of a block."""
    sizes = shape.sizes[axis + 1 :]
    steps = shape.strides[axis + 1 :]
    return len(sizes) == 4 and sizes[0] == 2 and steps[0] == max(steps)


def _block_axis(shape: Shape, blocks: int) -> int | None:
    """The dimension that counts blocks: the first of that size, since vLLM puts it first or behind keys and values."""
    for axis in range(min(2, len(shape.sizes))):
        if shape.sizes[axis] == blocks and (axis == 0 or shape.sizes[0] in (1, 2)):
            return axis
    return None


def _order(shape: Shape, axis: int, spec: Spec) -> str | None:
    """Whether heads or tokens are outermost in a block."""
    if spec.heads == 1:
        return "tokens_heads"
    dims = [(s, st) for s, st in zip(shape.sizes[axis + 1 :], shape.strides[axis + 1 :], strict=True)]
    if _has_halves_inside(shape, axis):
        dims = dims[1:]
    heads = [step for size, step in dims if size == spec.heads]
    tokens = [step for size, step in dims if size == spec.block_tokens]
    if len(heads) != 1 or len(tokens) != 1:
        # Not told apart by size, or not there.
        return None
    return "heads_tokens" if heads[0] > tokens[0] else "tokens_heads"


@dataclass(frozen=True)
class Caches:
    """What a worker registers."""

    layout: dict[str, Any]
    memories: list[tuple[int, int, Any]]


def describe(kv_caches: dict[str, Any], kv_cache_config: Any, ranks: int = 1, heads_total: int = 0) -> Caches:
    """Layout and memories of a worker's caches. Raises ConfigError if they are not understood.

    `ranks` are the tensor-parallel ranks, `heads_total` the model's heads of keys and values over all of them, which tells
    heads that several ranks hold from heads that are shared out.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(f"the model has {len(groups)} KV cache groups ({kinds}); kv_connector supports 1")
    blocks = kv_cache_config.num_blocks
    memories: dict[int, tuple[int, int, Any]] = {}
    places: dict[int, int] = {}
    regions: list[dict[str, Any]] = []
    orders: set[str] = set()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    block_tokens = None
    for layer in sorted(groups[0].layer_names, key=_natural):
        tensor = kv_caches.get(layer)
        if tensor is None:
            raise ConfigError(f"layer {layer} has no KV cache; those that have one are {list(kv_caches)[:4]}...")
        spec = _spec_of(layer, groups[0].kv_cache_spec, tensor, ranks, heads_total)
        if block_tokens not in (None, spec.block_tokens):
            raise ConfigError(f"layer {layer} has blocks of {spec.block_tokens} tokens, others of {block_tokens}")
        block_tokens = spec.block_tokens
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"KV cache of layer {layer} is on {tensor.device}: the tcp transport reads and writes host memory only"
            )
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key in seen:
            # A layer that uses another's cache.
            continue
        seen.add(key)
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        if base not in memories:
            places[base] = len(memories)
            memories[base] = (base, size, tensor)
        shape = Shape(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), tensor.data_ptr())
        for area in areas(layer, shape, spec, blocks):
            orders.add(area.order)
            regions.append(
                {
                    "layer": layer,
                    "kind": area.kind,
                    "group": 0,
                    "memory": places[base],
                    "base": area.address - base,
                    "block_stride": area.stride,
                    "block_bytes": area.bytes,
                    "dtype": spec.dtype,
                    "heads": spec.heads,
                    "heads_total": spec.heads_total,
                    "head_size": area.head_size,
                }
            )
    strangers = [layer for layer, tensor in kv_caches.items() if (tensor.data_ptr(), tuple(tensor.shape)) not in seen]
    if strangers:
        raise ConfigError(f"layers {strangers[:4]} have a KV cache and are in no KV cache group")
    if not regions:
        raise ConfigError(f"none of the layers {list(kv_caches)[:4]} is in the model's KV cache group")
    if len(orders) > 1:
        raise ConfigError(f"layers differ in the order of heads and tokens: {sorted(orders)}")
    layout = {"block_tokens": block_tokens, "blocks": blocks, "order": orders.pop(), "regions": regions}
    return Caches(layout, list(memories.values()))


def _spec_of(layer: str, spec: Any, tensor: Any, ranks: int, heads_total: int) -> Spec:
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        # One group whose layers differ in size; each has a spec of its own.
        spec = inner[layer]
    name = type(spec).__name__
    if name not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ConfigError(f"layer {layer} is a {name}; kv_connector supports full attention and MLA")
    dtype = DTYPES.get(str(tensor.dtype))
    if dtype is None:
        raise ConfigError(f"layer {layer} has elements of {tensor.dtype}; known are {', '.join(DTYPES)}")
    heads = getattr(spec, "num_kv_heads", 1)
    if name == "MLAAttentionSpec":
        total = 1
    elif heads > 1 or ranks == 1:
        # Layers may differ in their heads, and several on one rank are always a share.
        total = heads * ranks
    else:
        total = min(heads_total, ranks) if heads_total else ranks
    return Spec(block_tokens=spec.block_size, heads=heads, dtype=dtype, heads_total=total)


def _natural(name: str) -> Sequence[Any]:
    """Numbers in names compare as numbers: layer 10 comes after layer 9."""
    parts: list[Any] = []
    for part in name.split("."):
        parts.append((0, int(part), "") if part.isdigit() else (1, 0, part))
    return parts
