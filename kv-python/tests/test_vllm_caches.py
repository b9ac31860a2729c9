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
    (area,) = found((10, 2, 32, 4, 64), heads=4)
    assert area.kind == "key_value" and area.head_size == 128
    assert area.bytes == 2 * 32 * 4 * 64 * 4


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
