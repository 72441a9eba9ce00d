"""Supported combinations: ``supports`` answers for one, ``matrix`` for every method of the registry.

An answer is found by doing what a call does before it decodes: parse the specification, build the drafter, check the
request. So there is no second list to keep in step, and a reason is the very sentence that the call raises.

Without a model, a small stand-in takes the target's place. There, a method has what it needs: fresh weights in the
shape of its default recipe, or tables of a short text. What only a loaded model can tell (whether it has an adapter,
whether a draft model reads its token ids) is for ``Model.supports``.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anabranch import loading
from anabranch.declared import Keywords
from anabranch.decoding.engine import Engine
from anabranch.drafting.tables import TableSettings, Tokenizer, build_tables
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import AnabranchError, InputError, PerformanceWarning
from anabranch.methods import AUTO, Drafter, Method, Spec, make_drafter, methods, parse_spec, resolve_spec
from anabranch.methods.spec import Part
from anabranch.model.config import EncoderConfig, ModelConfig, RopeConfig
from anabranch.model.load import Target, resolve_device, resolve_dtype
from anabranch.model.pack import pack_decoder
from anabranch.model.quantize import quantize_decoder, rounding_of
from anabranch.model.weights import build_decoder
from anabranch.options import Options
from anabranch.prompts import check_stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "COMBINED",
    "QUESTIONS",
    "WITH_SOURCE",
    "Capabilities",
    "StandIn",
    "Support",
    "check_named_once",
    "matrix",
    "refuse",
    "support_of",
    "supports",
]

LAYERS = 16  # of the stand-in: as many as any recipe's module needs
WORDS = 64
ALPHABET = 'abcdefghijklmnopqrstuvwxyz0123456789 "{}[]:,.-+*/\\_ABCDEFGHIJKL'  # and an end token
REGEX = "[a-z]{40}"  # a constraint that no short text completes
COMBINED = "combined"
WITH_SOURCE = "encoder-decoder"
# the columns of the table: a call for every drafter
QUESTIONS: dict[str, dict[str, Any]] = {
    "match, greedy": {},
    "match, sampled": {"temperature": 1.0},
    "match, penalty": {"temperature": 1.0, "repetition_penalty": 1.2},
    "rejection, greedy": {"rule": "rejection"},
    "rejection, sampled": {"rule": "rejection", "temperature": 1.0},
    "rejection, penalty": {"rule": "rejection", "temperature": 1.0, "repetition_penalty": 1.2},
    "regex, greedy": {"regex": REGEX},
    "regex, sampled": {"regex": REGEX, "temperature": 1.0},
    "regex, rejection": {"regex": REGEX, "temperature": 1.0, "rule": "rejection"},
    "log probs": {"log_probs": True},
    "batch": {"prompts": 8},
    "stream": {"stream": True},
}


@dataclass(frozen=True)
class Support:
    """An answer to whether something is supported: true or false as a condition.

    reason  the message of the error that the call would raise; empty if it is supported
    """

    supported: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.supported


def support_of(question: Callable[[], object]) -> Support:
    """The answer to a question that raises an AnabranchError if something is not supported."""
    try:
        question()
    except AnabranchError as error:
        return Support(False, str(error))
    return Support(True)


def refuse(
    target: Target,
    options: Keywords,
    drafter: Callable[[Options], Drafter],
    *,
    prompts: int = 1,
    stream: bool = False,
) -> None:
    """Raise what ``Model.generate``, or with ``stream`` ``Model.stream``, raises for these options before decoding.

    drafter  builds the drafter of a call
    """
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1:
        raise InputError(f"prompts must be a whole number of at least 1, got {prompts!r}")
    if stream:
        check_stream(prompts)
    call = Options(options)
    call.seeds(prompts)
    if stream:
        call.check_single()
    Engine.refuse(target.decoder, call.request([0], target), drafter(call))


def check_named_once(drafter: str | Spec | None, options: Keywords) -> None:
    """Raise InputError if the drafter to ask about is named twice."""
    if drafter is not None and "drafter" in options:
        second = options["drafter"]
        raise InputError(f"the drafter is given twice, as {str(drafter)!r} and drafter={second!r}; drop one")


def supports(
    drafter: str | Spec | None = None,
    /,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str = "auto",
    kv: str = "auto",
    encoder: bool = False,
    prompts: int = 1,
    stream: bool = False,
    **options: Unpack[Keywords],
) -> Support:
    """Return whether this combination is supported, given a target that has whatever the drafter needs.

    drafter                      a specification; None: "auto"
    device, dtype, quantize, kv  as for ``load``
    encoder                      whether the target is an encoder-decoder model
    prompts                      the number of prompts decoded together
    stream                       whether the call is ``Model.stream``
    options                      those of ``Model.generate``

        >>> supports("streams", rule="rejection", temperature=1.0).reason
        "best-first trees hold the most probable nodes, not sampled ones, so rule='rejection' is not exact; ..."
        >>> bool(supports("streams:tree=chain", rule="rejection", temperature=1.0))
        True

    ``Model.supports`` asks the same of a loaded model. Neither predicts whether memory will suffice.
    """

    def question() -> None:
        check_named_once(drafter, options)
        loading.check(loading.LoadConfig(dtype=dtype, device=device, quantize=quantize, kv=kv))
        stand_in = StandIn.of(device, dtype, quantize, kv, encoder=encoder)
        given: Keywords = options if drafter is None else {**options, "drafter": drafter}
        refuse(
            stand_in.target, given, lambda call: stand_in.drafter(call.drafter or AUTO), prompts=prompts, stream=stream
        )

    return support_of(question)


class Letters:
    """The tokenizer of the stand-in: a token for each letter of ``ALPHABET``."""

    all_special_ids = (WORDS - 1,)

    def encode(self, text: str, **options: Any) -> list[int]:
        """The tokens of a text of these letters."""
        return [ALPHABET.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """The text of tokens; the end token has none."""
        return "".join(ALPHABET[token : token + 1] for token in ids)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The letters of tokens, or of one."""
        return self.decode([ids]) if isinstance(ids, int) else [self.decode([token]) for token in ids]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of letters."""
        return "".join(tokens)


class StandIn:
    """A small Llama with random weights in a target's place, for which every method has what it needs.

    encoder  it attends to the output of an encoder
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, quantize: str, *, encoder: bool = False) -> None:
        # of sizes that the native kernels take
        config = ModelConfig(
            *("llama", WORDS, 32, LAYERS, 2, 1, 32, 64, 4096),
            rope=RopeConfig(dim=32, max_positions=4096),
            eos_token_ids=(WORDS - 1,),
        )
        if encoder:
            config = replace(config, encoder=EncoderConfig(replace(config, position="none"), start=(0,)))
        kind = rounding_of(quantize)
        with torch.random.fork_rng(devices=[]):
            decoder = build_decoder(config, device="cpu").to(device, dtype)
        quantize_decoder(decoder, kind)
        self.target = Target(decoder, Letters(), config, "stand-in", None, "0" * 64, kind)
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._modules: dict[str, TrainedModule] = {}

    @staticmethod
    def of(
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        quantize: str = "auto",
        kv: str = "auto",
        *,
        encoder: bool = False,
    ) -> StandIn:
        """The stand-in of a kind, packed as ``load`` packs a target; made on first use.

        Where the type is left open, it is bf16, as in most published models. Raises what ``loading.check`` raises, and
        CapabilityError for a cache in int8 without the native kernels.
        """
        return _stand_in(resolve_device(device), resolve_dtype(dtype) or torch.bfloat16, quantize, kv, encoder)

    def drafter(self, spec: str | Spec) -> Drafter:
        """The drafter of a specification. Raises InputError or CapabilityError."""
        completed = self.spec(spec)
        able = [part for part in completed.parts if part.method.with_source or self.target.config.encoder is None]
        modules = [self.module(part.method) for part in able]
        return make_drafter(completed, self.target.decoder, *modules)

    def spec(self, spec: str | Spec) -> Spec:
        """A specification with "auto" resolved, and with tables for parts that name none."""
        parsed = parse_spec(spec)
        modules = [self.module(method) for method in methods() if method.default] if parsed.auto else ()
        resolved = resolve_spec(parsed, *modules)
        return Spec(tuple(map(self._complete, resolved.parts)))

    def module(self, method: Method) -> TrainedModule | None:
        """Fresh weights in the shape of a method's default recipe; None if it has none."""
        trained = method.trained or method.reads
        if trained is None:
            return None
        if trained.training.title not in self._modules:
            decoder = self.target.decoder
            with torch.random.fork_rng(devices=[]):
                made = trained.make(self.target.config, trained.training.recipe().config, None)
            self._modules[trained.training.title] = made.to(decoder.device, decoder.dtype).eval().requires_grad_(False)
        return self._modules[trained.training.title]

    def _complete(self, part: Part) -> Part:
        settings, tables = part.settings, part.method.tables
        if tables is None or not isinstance(settings, TableSettings) or settings.data:
            return part
        folder = self._folder / part.method.name
        if not folder.exists():
            text = np.arange(4 * WORDS, dtype=np.int64) % WORDS
            build_tables(tables, [text], folder, tokenizer=Tokenizer("stand-in", "", WORDS))
        return replace(part, settings=replace(settings, data=str(folder)))


@lru_cache(maxsize=4)
def _stand_in(device: torch.device, dtype: torch.dtype, quantize: str, kv: str, encoder: bool) -> StandIn:
    made = StandIn(device, dtype, quantize, encoder=encoder)
    with warnings.catch_warnings():  # nothing will be decoded, so it does not matter how fast
        warnings.simplefilter("ignore", PerformanceWarning)
        pack_decoder(made.target.decoder)
    if kv == "int8":
        made.target.decoder.quantize_cache()
    return made


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of one drafter.

    drafter   its specification
    adaptive  whether the size of its drafts follows the load
    trained   the method whose ``anabranch train`` command makes what it needs; empty: it needs nothing of the kind
    cells     the answers, by the name of the question
    """

    drafter: str
    adaptive: bool
    trained: str
    cells: Mapping[str, Support]


def matrix(ask: Callable[..., Support] = supports) -> tuple[Capabilities, ...]:
    """The answers to all ``QUESTIONS``, and to being combined, for each method with each of its variants.

    Without a model also for an encoder-decoder target; a loaded model answers for its own kind.

    ask  whom to ask: ``supports``, or ``Model.supports`` of a loaded model
    """
    rows = []
    for method in methods():
        for variant in method.variants:
            drafter = f"{method.name}:{variant}" if variant else method.name
            cells = {name: ask(drafter, **options) for name, options in QUESTIONS.items()}
            cells[COMBINED] = ask(f"{drafter}+{_partner(method).name}")
            if ask is supports:
                cells[WITH_SOURCE] = supports(drafter, encoder=True)
            adaptive = method.settings.parse(variant, method.name).adaptive
            rows.append(Capabilities(drafter, adaptive, _trained_by(method), cells))
    return tuple(rows)


def _partner(method: Method) -> Method:
    """The first other method that combines and needs nothing that is trained or built."""
    model_free = (m for m in methods() if m.combines and m.trained is None and m.reads is None and m.tables is None)
    return next(other for other in model_free if other is not method)


def _trained_by(method: Method) -> str:
    if method.tables is not None:
        return method.tables.command
    wanted = method.trained or method.reads
    return next((other.name.replace("_", "-") for other in methods() if wanted and other.trained is wanted), "")
