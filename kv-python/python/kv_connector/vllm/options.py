"""What a deployer says in --kv-transfer-config, as our configuration."""

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from typing import Any

from .. import ConfigError, check_config, config_defaults

# Keys of kv_connector_extra_config that are not fields of the native configuration.
MODEL = "model"
LEASE_S = "kv_lease_duration"
RENDEZVOUS_PORT = "rendezvous_port"
RENDEZVOUS_WAIT_MS = "rendezvous_wait_ms"
OURS = {MODEL, LEASE_S, RENDEZVOUS_PORT, RENDEZVOUS_WAIT_MS}


@dataclass(frozen=True)
class Options:
    """Checked options of one engine."""

    config: dict[str, Any]
    """For the native halves."""
    model: str
    """What names the model and its weights beyond doubt; producer and consumer must agree on it."""
    produces: bool
    consumes: bool
    ranks: int
    rendezvous_port: int | None = None
    """Where a producer tells offers by name; None: nowhere."""
    rendezvous_wait_s: float = 60.0
    """How long a consumer's request waits for an offer that did not come along with it."""
    keep_offers_s: float = 10.0
    """How long a producer tells an offer: as long as its lease lives if nobody renews it."""
    known: tuple[str, ...] = field(default=())


def parse(vllm_config: Any) -> Options:
    """Options from vLLM's configuration. Raises ConfigError naming the field if something cannot be."""
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {})
    defaults = config_defaults()
    known = tuple(sorted({*defaults, *OURS} - {"engine_id"}))
    unknown = sorted(set(extra) - set(known) - {"engine_id"})
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: {', '.join(unknown)} is not known; known are {', '.join(known)}")
    if "engine_id" in extra:
        raise ConfigError("kv_connector_extra_config: engine_id belongs into kv_transfer_config itself")
    model = extra.pop(MODEL, None) or _model_name(vllm_config.model_config)
    if not isinstance(model, str):
        raise ConfigError(f"kv_connector_extra_config: model is {model!r}, which is no text")
    port = extra.pop(RENDEZVOUS_PORT, None)
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536):
        raise ConfigError(f"kv_connector_extra_config: {RENDEZVOUS_PORT} is {port!r}, not a port")
    wait_ms = extra.pop(RENDEZVOUS_WAIT_MS, 60_000)
    if not isinstance(wait_ms, (int, float)) or isinstance(wait_ms, bool) or not 1 <= wait_ms <= 3_600_000:
        raise ConfigError(f"kv_connector_extra_config: {RENDEZVOUS_WAIT_MS} is {wait_ms!r}, not 1 to 3600000")
    lease_s = extra.pop(LEASE_S, None)
    if lease_s is not None:
        # The stock connector's name for it, in seconds.
        if not isinstance(lease_s, (int, float)) or isinstance(lease_s, bool) or not 0 < lease_s < math.inf:
            raise ConfigError(f"kv_connector_extra_config: {LEASE_S} is {lease_s!r}, not a number of seconds above 0")
        extra.setdefault("lease_ttl_ms", int(lease_s * 1000))
        extra.setdefault("lease_renewal_ms", int(lease_s * 1000))
    config = {"engine_id": str(transfer.engine_id)}
    host = os.environ.get("VLLM_HOST_IP")
    if host:
        config |= {"handshake_host": host, "transport_host": host}
    config |= extra
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
    _check_parallel(vllm_config.parallel_config)
    data_parallel = getattr(vllm_config.parallel_config, "data_parallel_size", 1)
    if port is not None and isinstance(data_parallel, int) and data_parallel > 1:
        raise ConfigError(
            f"kv_connector_extra_config: {RENDEZVOUS_PORT} is set, data_parallel_size is {data_parallel}; engines that share "
            "a configuration would share the port"
        )
    return Options(
        config=config,
        model=model,
        produces=bool(transfer.is_kv_producer),
        consumes=bool(transfer.is_kv_consumer),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        rendezvous_port=port if transfer.is_kv_producer else None,
        rendezvous_wait_s=wait_ms / 1e3,
        keep_offers_s=config.get("lease_ttl_ms", defaults["lease_ttl_ms"]) / 1e3,
        known=known,
    )


def _model_name(model_config: Any) -> str:
    parts = [str(model_config.model)]
    for name in ("revision", "quantization"):
        value = getattr(model_config, name, None)
        if value:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def fingerprint(model: str, vllm_config: Any, layers: list[str]) -> str:
    """The model's name and all else that decides what the bytes of a block mean, though shapes and strides do not show it.

    The attention backend packs a block as it likes, on CPUs by their instructions; cached elements may be quantised in several
    ways that all look like bytes; and the model's own configuration decides, for instance, how positions are turned.
    """
    parts = [model]
    cache_config = getattr(vllm_config, "cache_config", None)
    cache_dtype = getattr(cache_config, "cache_dtype", None)
    # A backend may pack a head's keys and values by whole blocks, so that blocks of another size hold other bytes.
    parts.append(f"block_size={getattr(cache_config, 'block_size', None)}")
    dtype = getattr(vllm_config.model_config, "dtype", None)
    parts += [f"kv_cache_dtype={cache_dtype}", f"dtype={dtype}"]
    context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    packings = set()
    for layer in layers:
        attention = context.get(layer)
        backend = getattr(attention, "attn_backend", None)
        if backend is not None:
            packings.add("/".join(filter(None, (backend.get_name(), getattr(attention, "isa", None)))))
    if packings:
        parts.append(f"attention={','.join(sorted(packings))}")
    hf_config = getattr(vllm_config.model_config, "hf_config", None)
    if hasattr(hf_config, "to_dict"):
        text = json.dumps(_plain(hf_config.to_dict()), sort_keys=True, default=str)
        parts.append(f"config={hashlib.sha256(text.encode()).hexdigest()[:16]}")
    return " ".join(parts)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Without what says where the model came from, which may differ between hosts."""
    return {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}


def _check_parallel(parallel: Any) -> None:
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if isinstance(size, int) and size > 1:
            raise ConfigError(f"{name} is {size}; kv_connector supports 1")
