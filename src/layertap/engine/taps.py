"""Taps: hooks that hand over the residual stream at layer boundaries while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from layertap.layers import NORM, LayerId

TapTarget = Callable[[int, torch.Tensor], None]


class Taps:
    """Calls ``target(column, hidden [T, H])`` for each tapped boundary during a forward.

    Boundary k is the input of decoder layer k, which a forward pre-hook sees; the boundary after the last
    layer is that layer's output; ``norm`` is the decoder's output.

    Args:
        decoder: the language model without its output head.
        layers: its decoder layers; with ``extract_only`` only those that are needed.
        ids: boundaries to tap; column c belongs to ``ids[c]``.
    """

    def __init__(
        self, decoder: nn.Module, layers: nn.ModuleList, ids: Sequence[LayerId], target: TapTarget
    ) -> None:
        self.target = target
        self._hooks: list[Any] = []
        for column, layer_id in enumerate(ids):
            if layer_id == NORM:
                self._hooks.append(decoder.register_forward_hook(self._output_hook(column)))
            elif layer_id < len(layers):
                hook = self._input_hook(column)
                self._hooks.append(layers[layer_id].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._hooks.append(layers[-1].register_forward_hook(self._output_hook(column)))

    def _input_hook(self, column: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.target(column, hidden[0])

        return hook

    def _output_hook(self, column: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            self.target(column, hidden[0])

        return hook

    def remove(self) -> None:
        for h in self._hooks:
            h.remove()
        self._hooks = []
