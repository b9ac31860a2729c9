"""How vLLM's KV caches are found out: known shapes, strides and the refusals. `caches` needs neither vLLM nor torch."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

import kv_connector
from kv_connector import ConfigError

FOLDER = Path(kv_connector.__file__).parent / "vllm"


def load(name):
    """A module of `kv_connector.vllm` without the package's own check for vLLM."""
    parent = sys.modules.setdefault("kv_connector._bare", types.ModuleType("kv_connector._bare"))
    parent.__path__ = [str(FOLDER)]
    full = f"kv_connector._bare.{name}"
    spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


caches = load("caches")
versions = load("versions")
Shape, Spec = caches.Shape, caches.Spec


def packed(sizes):
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def found(sizes, strides=None, heads=2, tokens=32, blocks=10, itemsize=4, address=1000):
    shape = Shape(tuple(sizes), tuple(strides or packed(sizes)), itemsize, address)
    return caches.areas("layers.0", shape, Spec(tokens, heads, "f32"), blocks)


def test_keys_and_values_side_by_side_in_each_head():
    (area,) = found((10, 2, 32, 128))
    assert (area.kind, area.address, area.order) == ("key_value", 1000, "heads_tokens")
    assert area.bytes == area.stride == 2 * 32 * 128 * 4
    assert area.head_size == 128


def test_keys_and_values_apart_in_two_halves():
    key, value = found((2, 10, 32, 2, 64))
    assert (key.kind, value.kind) == ("key", "value")
    assert key.bytes == 32 * 2 * 64 * 4 == key.stride
    assert value.address - key.address == 10 * key.stride
    assert key.order == "tokens_heads"


def test_keys_and_values_side_by_side_in_each_block():
    # A block's keys, then its values: apart, so that a peer with other ranks finds its heads.
    key, value = found((10, 2, 32, 4, 64), heads=4)
    assert (key.kind, value.kind) == ("key", "value")
    assert key.head_size == value.head_size == 64
    assert key.bytes == 32 * 4 * 64 * 4 and key.stride == 2 * key.bytes
    assert value.address - key.address == key.bytes
    assert key.order == "tokens_heads"


def test_heads_that_are_not_one_row_are_refused():
    # Keys and values of each token apart: (tokens, 2, heads, size).
    with pytest.raises(ConfigError, match="not consecutive"):
        found((10, 32, 2, 4, 64), heads=4)


def test_heads_over_all_ranks_are_told():
    one = {"layers.0": Tensor(SIZES, Storage(5_000, 10 * BLOCK))}

    def total(ranks, of_the_model):
        made = caches.describe(one, cache_config(list(one)), ranks, of_the_model)
        return made.layout["regions"][0]["heads_total"]

    assert total(1, 2) == 2 and total(4, 8) == 8
    # A layer with other heads than the model's first one.
    assert total(1, 8) == 2 and total(2, 16) == 4


def test_a_head_that_several_ranks_hold_is_told_from_one_that_is_shared_out():
    class OneHead(FullAttentionSpec):
        num_kv_heads = 1

    OneHead.__name__ = "FullAttentionSpec"
    sizes = (10, 1, 32, 128)
    one = {"layers.0": Tensor(sizes, Storage(5_000, 10 * BLOCK))}

    def total(ranks, of_the_model):
        made = caches.describe(one, cache_config(list(one), OneHead), ranks, of_the_model)
        return made.layout["regions"][0]["heads_total"]

    assert total(4, 4) == 4 and total(4, 2) == 2 and total(4, 1) == 1


def test_a_latent_has_one_head():
    (area,) = found((10, 32, 576), heads=1, itemsize=2)
    assert area.bytes == 32 * 576 * 2 and area.head_size == 576 and area.order == "tokens_heads"


def test_layers_of_one_allocation_lie_between_each_other():
    inner = 2 * 32 * 128
    (area,) = found((10, 2, 32, 128), strides=(4 * inner, 32 * 128, 128, 1), address=1000 + inner * 4)
    assert area.stride == 4 * area.bytes and area.address == 1000 + inner * 4


def test_a_permuted_view_is_found_by_its_strides():
    # Heads are named before tokens, but lie inside of them.
    (area,) = found((10, 2, 32, 128), strides=(8192, 128, 256, 1))
    assert area.order == "tokens_heads"


@pytest.mark.parametrize(
    ("sizes", "strides", "words"),
    [
        ((9, 2, 32, 128), None, "no dimension has the size 10"),
        ((10, 2, 32, 128), (16384, 8192, 128, 1), "not consecutive"),
        ((10, 2, 32, 128), (4096, 4096, 128, 1), "overlap"),
        ((10, 3, 32, 7), None, "whole number"),
        ((3, 10, 2, 32, 64), None, "no dimension|keys and values"),
        ((32, 2, 10, 128), None, "no dimension"),
    ],
)
def test_what_is_not_understood_is_refused_with_shape_and_strides(sizes, strides, words):
    with pytest.raises(ConfigError, match=words) as refused:
        found(sizes, strides)
    assert "layers.0" in str(refused.value) and str(list(sizes)) in str(refused.value)


def test_layers_are_in_the_order_of_their_numbers():
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.1.attn"]
    assert sorted(names, key=caches._natural) == names[::-1]


@pytest.mark.parametrize(
    ("version", "missing", "words"),
    [
        ("0.31.2", [], "needs vLLM 0.32 or newer, this is 0.31.2"),
        ("0.9.1+cpu", [], "needs vLLM 0.32"),
        ("0.40.0", ["vllm.x.KVThing"], "does not know the connector interface of vLLM 0.40.0: vllm.x.KVThing"),
    ],
)
def test_a_vllm_that_cannot_be_used_is_named(version, missing, words):
    assert words in versions.complaint(version, missing)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "1.0.0", "dev", "0.0.0"])
def test_others_can_be_used(version):
    assert versions.complaint(version, []) is None


class Storage:
    def __init__(self, address, size):
        self.address, self.size = address, size

    def data_ptr(self):
        return self.address

    def nbytes(self):
        return self.size


class Tensor:
    """A torch tensor as far as it is looked at."""

    def __init__(self, sizes, storage, offset=0, strides=None, dtype="torch.float32", device="cpu"):
        self.shape, self.strides, self.storage = sizes, strides or packed(sizes), storage
        self.offset, self.dtype = offset, dtype
        self.device = types.SimpleNamespace(type=device)

    def stride(self):
        return self.strides

    def element_size(self):
        return 4

    def data_ptr(self):
        return self.storage.address + self.offset

    def untyped_storage(self):
        return self.storage


class FullAttentionSpec:
    block_size, num_kv_heads = 32, 2


class SlidingWindowSpec(FullAttentionSpec):
    pass


def cache_config(layers, spec=FullAttentionSpec, groups=1):
    group = types.SimpleNamespace(layer_names=layers, kv_cache_spec=spec())
    return types.SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=10)


SIZES = (10, 2, 32, 128)
BLOCK = 2 * 32 * 128 * 4


def test_layers_of_their_own_memories_and_layers_that_share_one():
    own = {f"layers.{n}": Tensor(SIZES, Storage(10_000_000 * (n + 1), 10 * BLOCK)) for n in (10, 9)}
    made = caches.describe(own, cache_config(list(own)))
    assert [r["layer"] for r in made.layout["regions"]] == ["layers.9", "layers.10"]
    assert [r["memory"] for r in made.layout["regions"]] == [0, 1]
    assert made.memories[0][:2] == (100_000_000, 10 * BLOCK)
    assert made.layout["regions"][0]["block_bytes"] == BLOCK and made.layout["order"] == "heads_tokens"
    # Two layers in one allocation, block by block.
    storage, strides = Storage(5_000, 20 * BLOCK), (2 * BLOCK // 4, 32 * 128, 128, 1)
    shared = {f"layers.{n}": Tensor(SIZES, storage, n * BLOCK, strides) for n in (0, 1)}
    made = caches.describe(shared, cache_config(list(shared)))
    assert len(made.memories) == 1 and made.memories[0][:2] == (5_000, 20 * BLOCK)
    assert [(r["base"], r["block_stride"]) for r in made.layout["regions"]] == [(0, 2 * BLOCK), (BLOCK, 2 * BLOCK)]


def test_a_layer_that_uses_anothers_cache_is_not_moved_twice():
    one = Tensor(SIZES, Storage(5_000, 10 * BLOCK))
    made = caches.describe({"layers.0": one, "layers.1": one}, cache_config(["layers.0", "layers.1"]))
    assert [r["layer"] for r in made.layout["regions"]] == ["layers.0"]
    # Also if it is in no group.
    assert caches.describe({"layers.0": one, "draft": one}, cache_config(["layers.0"])).layout["regions"]


@pytest.mark.parametrize(
    ("kv_caches", "config", "words"),
    [
        (["layers.0"], cache_config(["layers.0", "layers.1"]), "layer layers.1 has no KV cache"),
        (["layers.0", "other"], cache_config(["layers.0"]), r"\['other'\] have a KV cache and are in no"),
        (["layers.0"], cache_config(["layers.0"], SlidingWindowSpec), "layers.0 is a SlidingWindowSpec"),
        (["layers.0"], cache_config(["layers.0"], groups=2), "2 KV cache groups"),
    ],
)
def test_caches_that_are_not_what_the_model_says_are_refused(kv_caches, config, words):
    tensors = {n: Tensor(SIZES, Storage(5_000_000 * (i + 1), 10 * BLOCK)) for i, n in enumerate(kv_caches)}
    with pytest.raises(ConfigError, match=words):
        caches.describe(tensors, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "torch.int8"}, "elements of torch.int8"),
        ({"device": "cuda"}, "host memory only"),
    ],
)
def test_elements_and_devices_that_are_not_known_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        caches.describe({"layers.0": Tensor(SIZES, Storage(5_000, 10 * BLOCK), **change)}, cache_config(["layers.0"]))
