"""Which layers to capture, and which depth each number means.

The canonical form is the depth k: r_k, the residual stream after k decoder layers and before any final
norm, for 0 <= k <= L. The field counts in two ways that look alike and mean different tensors:

* ``output``: id i is what decoder layer i puts out, so r_{i+1} (speculators 0.3).
* ``input``: id i is what decoder layer i takes in, so r_i (vLLM, Hugging Face ``hidden_states[i]``);
  id L is what the last layer puts out.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Convention = Literal["input", "output"]


class Layers(BaseModel):
    """Layer ids together with the convention they are counted in; a bare list is not accepted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        Field(min_length=1, description="Layer ids, each once, in any order; stored in ascending order."),
    ]
    convention: Convention = Field(
        description="`output`: id i is the output of decoder layer i (r_{i+1}). `input`: id i is its input (r_i), "
        "as vLLM and Hugging Face count; id L is the output of the last layer."
    )

    @model_validator(mode="before")
    @classmethod
    def _no_bare_list(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError(
                "a bare list is refused, since the same numbers mean different layers in different tools; write "
                f"`layers: {{ids: {list(value)}, convention: output}}` or `convention: input`"
            )
        return value

    @field_validator("ids", mode="before")
    @classmethod
    def _list_of_numbers(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"write a list of layer ids, such as [2, 14, 26, 29], not {value!r}")
        return value

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths k of r_k, ascending; duplicates are kept for :meth:`check` to refuse."""
        shift = 1 if self.convention == "output" else 0
        return tuple(sorted(i + shift for i in self.ids))

    def check(self, num_layers: int) -> None:
        """Refuse ids that name no layer of a model with ``num_layers`` decoder layers, or one layer twice.

        Raises:
            ValueError: says which id, and the largest that the convention allows.
        """
        repeated = sorted({i for i in self.ids if self.ids.count(i) > 1})
        if repeated:
            raise ValueError(f"layers.ids names {repeated} more than once; list each layer once")
        top = num_layers - 1 if self.convention == "output" else num_layers
        above = [i for i in self.ids if i > top]
        if above:
            hint = ""
            if max(above) == num_layers:
                hint = f"; if ids are counted as vLLM and Hugging Face do, up to {num_layers}, say `convention: input`"
            raise ValueError(
                f"layers.ids {above} lie above the model: with convention '{self.convention}' and {num_layers} "
                f"decoder layers the largest id is {top}{hint}"
            )
