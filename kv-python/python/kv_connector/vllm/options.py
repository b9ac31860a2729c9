"""What a deployer says in --kv-transfer-config, as our configuration."""

import os
from dataclasses import dataclass, field
from typing import Any

from .. import ConfigError, check_config, config_defaults

# Keys of kv_connector_extra_config that are not fields of the native configuration.
MODEL = "model"
LEASE_S = "kv_lease_duration"


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
    known: tuple[str, ...] = field(default=())


def parse(vllm_config: Any) -> Options:
    """Options from vLLM's configuration. Raises ConfigError naming the field if something cannot be."""
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {})
    defaults = config_defaults()
    known = tuple(sorted([*defaults, MODEL, LEASE_S]))
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: {', '.join(unknown)} is not known; known are {', '.join(known)}")
    if "engine_id" in extra:
        raise ConfigError("kv_connector_extra_config: engine_id belongs into kv_transfer_config itself")
    model = extra.pop(MODEL, None) or _model_name(vllm_config.model_config)
    if not isinstance(model, str):
        raise ConfigError(f"kv_connector_extra_config: model is {model!r}, which is no text")
    lease_s = extra.pop(LEASE_S, None)
    if lease_s is not None:
        # The stock connector's name for it, in seconds.
        if not isinstance(lease_s, (int, float)) or isinstance(lease_s, bool) or not lease_s > 0:
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
    return Options(
        config=config,
        model=model,
        produces=bool(transfer.is_kv_producer),
        consumes=bool(transfer.is_kv_consumer),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        known=known,
    )


def _model_name(model_config: Any) -> str:
    parts = [str(model_config.model)]
    for name in ("revision", "quantization"):
        value = getattr(model_config, name, None)
        if value:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def _check_parallel(parallel: Any) -> None:
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if isinstance(size, int) and size > 1:
            raise ConfigError(f"{name} is {size}; kv_connector supports 1")
