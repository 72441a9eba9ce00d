"""The entry of a method's trained weights: how they are created, stored, described and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from anabranch.drafting.published import Layout
from anabranch.errors import CapabilityError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe, Shape, Training
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.model.passes import Rider

__all__ = ["Learn", "Trainable", "Trained", "TrainedModule", "adopt_shape", "check_shape"]

T = TypeVar("T")


class Trainable(nn.Module):
    """The base class of whatever ``train.trainer`` trains; ``config`` is its shape."""

    config: Any

    def num_parameters(self) -> int:
        """The number of trained parameters; works on the meta device."""
        return sum(parameter.numel() for parameter in self.parameters())

    def rates(self) -> Mapping[str, float]:
        """Multiples of the learning rate by the name of a parameter; it is 1 for all that are not named."""
        return {}

    @property
    def lowest(self) -> int:
        """The lowest of the target's layers that gradients pass through, counted from 0."""
        return 0

    def clipped(self, options: Any) -> list[list[nn.Parameter]]:
        """The parameters, in groups whose gradients are clipped together; ``options`` are the objective's."""
        return [list(self.parameters())]

    def prepare(self, target: Decoder, options: Any, step: int) -> None:
        """Called before each step of the training, counted from 0.

        target   what gradients pass through
        options  of the objective: the weights of the loss
        """


class TrainedModule(Trainable):
    """The base class of the trained modules of methods.

    vocabulary  buffer [Vd] int64: the token ids of the draft vocabulary, ascending
    """

    vocabulary: Tensor

    def __init__(self) -> None:
        super().__init__()
        # in a tuple, so that the head is not registered as a submodule
        self._shared: tuple[nn.Module | None, dict[str, object]] = (None, {})

    def shared(self, target: Decoder, kind: type[T], make: Callable[[], T]) -> T:
        """The object of a ``kind`` shared by all drafters of this module and ``target``; built by ``make`` once.

        Packed copies of weights take tens of MB and are the same for every drafter. Only those for one target are kept:
        another target, or the same one after it was packed, replaces them.
        """
        if self._shared[0] is not target.head:
            self._shared = (target.head, {})
        kept = self._shared[1]
        made = kept.get(kind.__name__)
        if not isinstance(made, kind):
            made = kept[kind.__name__] = make()
        return made


class Learn(Protocol):
    """Creates a training objective; ``frozen`` is a copy of the target for passes without gradients."""

    def __call__(self, target: Decoder, module: Any, options: Any, *, segment: int, frozen: Decoder) -> Objective[Any]:
        """The objective of a module with weights of the loss. Raises CapabilityError if it cannot be trained."""


def adopt_shape(recipe: Recipe, config: Any) -> Recipe:
    """The recipe with the shape of a trained module, except what the user has set and the terms on the target."""
    kept = recipe.given | {"lora_rank"}
    shape = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in kept}
    return replace(recipe, config=replace(recipe.config, **shape))


def check_shape(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise InputError if a trained module, with ``theirs`` as its config, has another shape than this training."""
    for name, value in mine.items():
        if theirs[name] != value:
            raise InputError(
                f"it has {name} {theirs[name]!r}, but this training uses {value!r}; give the same option, or start "
                "from another adapter"
            )


@dataclass(frozen=True)
class Trained:
    """The trained part of a method.

    training   recipes and options
    module     the class of its module: (target's config, module's config, draft vocabulary [Vd] or None: all) -> module
               with fresh weights. Raises InputError if they do not fit together
    objective  creates the training objective
    describe   a module's config -> its size in a few words, for the card
    rider      (target, module) -> rows that become part of the target itself, since its main rows attend to them
               (``Decoder.rider``), or None; asked whenever an adapter is loaded
    begin      (module with fresh weights, trained module): copy the trained weights into the fresh module, which may be
               larger. Raises InputError that names what does not fit
    adopt      (recipe, a trained module's config): the recipe with that shape, but for what the user has set
    fresh      (target, module with fresh weights, training examples, the decoder for passes without gradients): take
               from the target what training begins with
    export     (folder, trained module, target): write the module in a form of its own beside the adapter, if there is
               one; the folder ``model`` inside the adapter's, and others beside it, receive it. Returns the module to
               store and the target that it belongs to where training has made another target, otherwise None
    packed     (recipe) -> whether gradients pass through the top layers only, from ``Trainable.lowest`` on, so that the
               target may be packed as its file stores it
    published  the layouts of others' checkpoints that are read as adapters of this method
    """

    training: Training
    module: type[TrainedModule]
    objective: Learn
    describe: Callable[[Any], str]
    begin: Callable[[Any, Any], None]
    adopt: Callable[[Recipe, Any], Recipe] = adopt_shape
    export: Callable[[Path, Any, Target], tuple[TrainedModule, Target] | None] | None = None
    fresh: Callable[[Decoder, Any, Sequence[Example], Decoder], None] | None = None
    rider: Callable[[Decoder, Any], Rider | None] = lambda target, module: None
    packed: Callable[[Recipe], bool] = lambda recipe: False
    published: tuple[Layout, ...] = ()

    @property
    def config(self) -> type[Shape]:
        """The class of the module's config."""
        return type(self.training.recipe().config)

    def make(self, model: ModelConfig, config: Any, vocabulary: Tensor | None) -> TrainedModule:
        """A module with fresh weights, for a target of this config."""
        return self.module(model, config, vocabulary)  # type: ignore[call-arg]

    def learn(self, target: Decoder, module: Any, recipe: Recipe, *, frozen: Decoder) -> Objective[Any]:
        """The training objective of a module with a recipe. Raises CapabilityError if it cannot be trained."""
        return self.objective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)

    def require(self, module: nn.Module | None, method: str) -> Any:
        """The module, which the drafter of a method needs. Raises CapabilityError without one."""
        if isinstance(module, self.module):
            return module
        raise CapabilityError(
            f"the drafter {method!r} needs an adapter that was trained for this target, and there is none; give one "
            f"with adapter=FOLDER, train one with 'anabranch train {method}', or use drafter='prompt_lookup'"
        )
