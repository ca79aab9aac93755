"""Checks that a decoder computes sequences that lie end to end in one batch each by itself, in engines and learners alike."""

from typing import Any

from antiphon.core.errors import UnsupportedError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})  # names of transformers
LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})  # scaled by the longest sequence of a batch


def require_separable_sequences(model: Any) -> None:
    """Check that a model of transformers computes a token from the tokens of its own sequence, whatever lies beside it.

    Attention is replaced by one that knows where a sequence begins. Convolutions, linear attention and state-space layers
    do not know: what they have read of one sequence would leak into the next.

    Raises:
        UnsupportedError: It does not.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if kinds or config.is_encoder_decoder:
        found = f"layers of kind {', '.join(sorted(kinds))}" if kinds else "an encoder"
        raise UnsupportedError(f"{name} has {found}: only decoders with plain attention are supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedError(f"{name} attends to later tokens: only decoders with causal attention are supported")
    if not model._supports_attention_backend:
        raise UnsupportedError(
            f"{name} does not let its attention function be replaced, as learners and the native engine do"
        )
    for rope in _rope_types(config):
        if rope in LENGTH_DEPENDENT_ROPES:
            raise UnsupportedError(
                f"{name} scales its rotary embedding by the longest sequence of a batch (rope_type {rope!r}): a token would "
                "depend on its neighbours in the batch"
            )


def has_ropes_by_layer_type(config: Any) -> bool:
    """Return True if layers of different kinds have rotary embeddings of their own."""
    return len(_ropes_by_layer_type(config)) > 1 and len(set(getattr(config, "layer_types", None) or ())) > 1


def _rope_types(config: Any) -> set[str]:
    ropes = [getattr(config, "rope_parameters", None) or {}, *_ropes_by_layer_type(config).values()]
    return {rope["rope_type"] for rope in ropes if isinstance(rope.get("rope_type"), str)}


def _ropes_by_layer_type(config: Any) -> dict[str, Any]:
    ropes = getattr(config, "rope_parameters", None) or {}
    return {kind: rope for kind, rope in ropes.items() if isinstance(rope, dict)}
