"""A second look at the residual stream, by another way than the capture's.

The capture reads what the model's own code hands out as auxiliary states. The witness stands at the layers
themselves: r_k is what decoder layer k is given (for k = L: what the final norm is given). It keeps every row at a
few columns spread over the hidden axis, and the capture must agree with it bit for bit. So a layer too deep or too
shallow, a residual that was not added, a norm that was applied, and rows that belong to another request or to
another step are each found in the step that computed them, for the price of a hundredth of one more read.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from tasks.extract.step import SeamError

COLUMNS = 64


def columns(rows_NH: torch.Tensor) -> torch.Tensor:
    """Every (H / 64)th column, as a view [N, C]."""
    return rows_NH[:, :: max(1, rows_NH.shape[1] // COLUMNS)]


def unlike_rows(rows_NH: torch.Tensor, seen_NC: torch.Tensor) -> torch.Tensor:
    """Rows that differ from what was seen, in any bit of the columns seen; bool [N]."""
    captured_NC = columns(rows_NH).contiguous()
    if captured_NC.shape != seen_NC.shape or captured_NC.dtype != seen_NC.dtype:
        return torch.ones(rows_NH.shape[0], dtype=torch.bool, device=rows_NH.device)
    bits = torch.int16 if captured_NC.element_size() == 2 else torch.int32
    return (captured_NC.view(bits) != seen_NC.view(bits)).any(dim=1)


class Witness:
    """Hooks on the decoder layers of a model that runs eagerly; a compiled model does not call them."""

    def __init__(self, model: Any, depths: Sequence[int]) -> None:
        """Watch the layers.

        Raises:
            SeamError: the model has no ``layers`` and ``norm`` where language models keep them, or their arguments
                have other names.
        """
        stack = _stack(model)
        self._depths = tuple(depths)
        self._seen: dict[int, torch.Tensor] = {}
        self.hooks: list[Any] = []
        """Handles by which the hooks can be removed."""
        for depth in depths:
            is_last = depth == len(stack.layers)
            module = stack.norm if is_last else stack.layers[depth]
            hidden, residual = (0, 1) if is_last else _places(module)
            hook = self._hook(depth, hidden, residual)
            self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def take(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """What the layers were given since the last call: per depth [N, C].

        Raises:
            SeamError: a layer was not called.
        """
        seen, self._seen = self._seen, {}
        if missing := [depth for depth in self._depths if depth not in seen]:
            raise SeamError(f"the layers at depths {missing} were not called as modules; was the model compiled?")
        return tuple(seen[depth][:num_rows] for depth in self._depths)

    def _hook(self, depth: int, hidden: int, residual: int) -> Any:
        def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_NH = args[hidden] if len(args) > hidden else kwargs["hidden_states"]
            residual_NH = args[residual] if len(args) > residual else kwargs.get("residual")
            seen_NC = columns(hidden_NH)
            # Kernels that fuse the addition with the norm overwrite both; what is kept must be a copy.
            self._seen[depth] = seen_NC.clone() if residual_NH is None else seen_NC + columns(residual_NH)

        return look


def _stack(model: Any) -> Any:
    for owner in (model, getattr(model, "language_model", None)):
        stack = getattr(owner, "model", None)
        if hasattr(stack, "layers") and hasattr(stack, "norm"):
            return stack
    raise SeamError(f"{type(model).__name__} keeps its decoder layers in an unknown place")


def _places(layer: Any) -> tuple[int, int]:
    """Positions of the hidden states and of the residual among a decoder layer's arguments."""
    names = list(inspect.signature(layer.forward).parameters)
    try:
        return names.index("hidden_states"), names.index("residual")
    except ValueError as error:
        raise SeamError(f"{type(layer).__name__} takes {names}, not hidden_states and residual") from error
