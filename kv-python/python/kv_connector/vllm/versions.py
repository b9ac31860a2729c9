"""Which vLLM this is, and whether its connector interface is the one that we speak."""

import importlib
import logging
import re

OLDEST = (0, 32)
NEWEST_TESTED = (0, 32)

# What we need beyond the base class; it came with 0.32.
NEEDED = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorBase_V1",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "vllm.v1.outputs": ("KVConnectorOutput",),
}


def parse(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version, or None if it has none (a build from a checkout)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def complaint(version: str, missing: list[str]) -> str | None:
    """Why this vLLM cannot be used; None if it can."""
    number = parse(version)
    oldest = ".".join(map(str, OLDEST))
    if number is not None and (0, 0) < number < OLDEST:
        return f"kv_connector.vllm needs vLLM {oldest} or newer, this is {version}"
    if missing:
        return (
            f"kv_connector.vllm does not know the connector interface of vLLM {version}: "
            f"{', '.join(missing)} is not there (made for {oldest} to {'.'.join(map(str, NEWEST_TESTED))})"
        )
    return None


def check() -> None:
    """Raises ImportError with words for a person if the installed vLLM is none, too old or too new."""
    try:
        import vllm
    except ImportError as error:
        raise ImportError(f"kv_connector.vllm needs vLLM, which cannot be imported: {error}") from error
    version = getattr(vllm, "__version__", "unknown")
    missing = []
    number = parse(version)
    if number is None or number >= OLDEST:
        for module, names in NEEDED.items():
            try:
                found = importlib.import_module(module)
            except ImportError:
                missing.append(module)
                continue
            missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    text = complaint(version, missing)
    if text:
        raise ImportError(text)
    if number is not None and number > NEWEST_TESTED:
        logging.getLogger("vllm.kv_connector").warning(
            "vLLM %s is newer than what kv_connector was tested with (%d.%d)", version, *NEWEST_TESTED
        )
