"""Options of a call, each declared once: its type, default, allowed values and help text.

``Keywords`` types the keyword arguments of ``Model.generate``. What checks them (``check``), the command line
(``cli.configured``) and the engine's parameters (``sampling.SamplingParams``) read the same declarations. Importing
this module is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias, TypedDict, get_args, get_type_hints

from anabranch.errors import InputError
from anabranch.support.nearest import hint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CALL",
    "DEFAULTS",
    "SCORES",
    "STRUCTURES",
    "Biases",
    "ChatKeywords",
    "Ids",
    "Keywords",
    "LogitsProcessor",
    "Option",
    "Rule",
    "ScoreKeywords",
    "biases",
    "check",
    "check_each",
    "decay",
    "hints_of",
    "ids_of",
    "integer",
    "logit_biases",
    "structure_of",
    "words",
]

Rule = Literal["match", "rejection"]
RULES = get_args(Rule)
NEW_TOKENS_FLAGS = ("--max-new-tokens", "-n")
ESCAPES = r"\n, \t, \xNN and \uNNNN are escapes, \\ is a backslash"
LogitsProcessor: TypeAlias = "Callable[[Sequence[int], Tensor], Tensor]"
"""(all tokens up to and including the node, logits [V]) -> logits [V]; -inf forbids a token."""
Ids: TypeAlias = tuple[int, ...]
Biases: TypeAlias = tuple[tuple[Ids, float], ...]
Check: TypeAlias = Callable[[str, Any], object]
SLOW = {"Tensor": object, "torch": SimpleNamespace(dtype=object)}  # types whose import takes seconds


class Specification(Protocol):
    """A parsed specification of a drafter (``methods.Spec``)."""

    @property
    def plain(self) -> bool:
        """Return whether it drafts nothing."""


@dataclass(frozen=True)
class Option:
    """One option of a call or of loading.

    help     imperative, one line
    check    function (name, value) that raises InputError for a value that is not allowed; None: checked elsewhere
    default  None: the model's default, or off
    flags    its names on the command line, unless that is --name
    values   what Tab completes; of others, the shell completes paths
    metavar  shown for its value in --help
    """

    help: str
    check: Check | None = None
    default: Any = None
    flags: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    metavar: str | None = None


# -- allowed values --------------------------------------------------------------------------------------
def allowed(what: str, fits: Callable[[Any], bool]) -> Check:
    """A check whose error says that the option must be ``what``."""

    def checked(name: str, value: Any) -> None:
        if not fits(value):
            raise InputError(f"{name} must be {what}, got {value!r}")

    return checked


def number(what: str, fits: Callable[[float], bool]) -> Check:
    """A check of a number; NaN fits nothing."""
    return allowed(what, lambda value: _is_number(value) and fits(value))


def whole(least: int, note: str = "") -> Check:
    """A check of a whole number."""
    what = f"a whole number of at least {least}{note}"
    return allowed(what, lambda value: _is_integer(value) and value >= least)


def one_of(*values: str) -> Check:
    """A check of a name; its error suggests the nearest one."""

    def checked(name: str, value: Any) -> None:
        if value not in values:
            near = hint(value, values) if isinstance(value, str) else ""
            raise InputError(f"{name} must be {' or '.join(map(repr, values))}, got {value!r}{near}")

    return checked


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


integer = allowed("an integer", _is_integer)
positive = number("a positive number (1 is off)", lambda value: 0 < value < math.inf)
flag = allowed("True or False", lambda value: isinstance(value, bool))


def texts(name: str, value: Any) -> None:
    """Check one string or a list of them."""
    if not all(isinstance(text, str) and text for text in (value if _is_list(value) else [value])):
        raise InputError(f"{name} takes strings of at least one character, got {value!r}")


def seeds(name: str, value: Any) -> None:
    """Check one seed or a list of them."""
    for seed in value if _is_list(value) else [value]:
        integer(name, seed)


def ids_of(name: str, value: Any) -> Ids:
    """Token ids given as one id, as several, or as None. Raises InputError for anything else."""
    if value is None:
        return ()
    if _is_id(value):
        return (int(value),)
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise InputError(f"{name} must be a list of token ids, got {value!r}")
    tokens = tuple(value)
    if wrong := [token for token in tokens if not _is_id(token)]:
        raise InputError(f"{name} must be a list of token ids, got {wrong[0]!r} in it")
    return tuple(map(int, tokens))


def words(name: str, value: Any) -> tuple[Ids, ...]:
    """Lists of token ids, none of them empty. Raises InputError for anything else."""
    if value is None:
        return ()
    if not _is_list(value):
        raise InputError(f"{name} must be a list of lists of token ids, got {value!r}")
    lists = tuple(ids_of(f"an item of {name}", word) for word in value)
    if () in lists:
        raise InputError(f"{name} has an empty list; leave it out")
    return lists


def biases(name: str, value: Any) -> Biases:
    """Biases of sequences of token ids. Raises InputError for anything else."""
    wrong = f"{name} must be {{(token ids): bias}} or [[[token ids], bias], ...]"
    if value is None:
        return ()
    if not isinstance(value, Mapping) and not _is_list(value):
        raise InputError(f"{wrong}, got {value!r}")
    by_ids: dict[Ids, float] = {}
    for item in value.items() if isinstance(value, Mapping) else value:
        if not _is_list(item) or len(item) != 2:
            raise InputError(f"{wrong}, got {item!r} in it")
        ids, bias = ids_of(name, item[0]), item[1]
        if not ids or not _is_number(bias) or math.isnan(bias):
            raise InputError(f"{wrong}, got {item!r} in it")
        by_ids[ids] = float(bias)
    return tuple(by_ids.items())


def logit_biases(name: str, value: Any) -> Biases:
    """Biases of single token ids. Raises InputError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be {{token id: bias}}, got {value!r}")
    for token, bias in value.items():
        if not _is_id(token) or not _is_number(bias) or math.isnan(bias):
            raise InputError(f"{name} must be {{token id: bias}}, got {token!r}: {bias!r} in it")
    return tuple(((int(token),), float(bias)) for token, bias in value.items())


def decay(name: str, value: Any) -> tuple[int, float] | None:
    """The start and factor of a length penalty; None: off. Raises InputError for anything else."""
    if value is None or (isinstance(value, Sequence) and not value):
        return None
    if not _is_list(value) or len(value) != 2 or not _is_id(value[0]) or not _is_number(value[1]):
        raise InputError(f"{name} must be (start, factor), or () for off, got {value!r}")
    return int(value[0]), float(value[1])


# -- the options -----------------------------------------------------------------------------------------
off = whole(0, " (off)")
count = whole(1)
token_id = allowed("a token id", _is_id)
temperatures = number("0 (greedy) or a positive number", lambda value: 0 <= value < math.inf)
counts_or_all = allowed("0 (off) or a positive integer", _is_id)
finite = number("a finite number", math.isfinite)
masses = number("greater than 0 and at most 1 (off)", lambda value: 0 < value <= 1)
fractions = number("at least 0 (off) and less than 1", lambda value: 0 <= value < 1)
functions = allowed("a list of functions", lambda value: isinstance(value, Sequence) and all(map(callable, value)))
regex = allowed("a regular expression", lambda value: isinstance(value, str) and bool(value))
lark = allowed("a grammar as text", lambda value: isinstance(value, str) and bool(value.strip()))
schemas = allowed(
    "a JSON schema: a dictionary, its JSON, or a pydantic model",
    lambda value: isinstance(value, str | Mapping | bool) or hasattr(value, "model_json_schema"),
)
predictions = allowed(
    "a text or a list of token ids",
    lambda value: isinstance(value, str) or (_is_list(value) and all(map(_is_id, value))),
)
lora_name = allowed("the name of a loaded LoRA", lambda value: isinstance(value, str))
adapter_name = allowed("the name of a loaded adapter", lambda value: isinstance(value, str))


class ScoreKeywords(TypedDict, total=False):
    """Options that change scores by the tokens so far: transformers' of the same names, and OpenAI's two penalties."""

    repetition_penalty: Annotated[float | None, Option("divide the logits of earlier tokens by this; 1: off", positive)]
    presence_penalty: Annotated[
        float | None, Option("subtract this from the logits of tokens that are in the new text; 0: off", finite)
    ]
    frequency_penalty: Annotated[
        float | None, Option("subtract this from a token's logit for each time it is in the new text; 0: off", finite)
    ]
    no_repeat_ngram_size: Annotated[int | None, Option("repeat no n-gram of this length, the prompt's included", off)]
    sequence_bias: Annotated[
        Mapping[tuple[int, ...], float] | Sequence[Any] | None,
        Option("{token ids: bias}: add to the logit of the last id where the others precede it", biases),
    ]
    logit_bias: Annotated[Mapping[int, float] | None, Option("{token id: bias}: add to its logit", logit_biases)]
    bad_words_ids: Annotated[Sequence[Sequence[int]] | None, Option("forbid these lists of token ids", words)]
    suppress_tokens: Annotated[Sequence[int] | None, Option("forbid these token ids", ids_of)]
    begin_suppress_tokens: Annotated[Sequence[int] | None, Option("forbid these ids as the first new token", ids_of)]
    min_new_tokens: Annotated[
        int | None, Option("let the model end the text no earlier than after this many new tokens", off)
    ]
    min_length: Annotated[int | None, Option("as min_new_tokens, which overrides it, with the prompt counted", off)]
    forced_bos_token_id: Annotated[int | None, Option("put this token after a prompt of one token", token_id)]
    forced_eos_token_id: Annotated[
        int | Sequence[int] | None, Option("end a text of max_new_tokens with this token, or one of these", ids_of)
    ]
    exponential_decay_length_penalty: Annotated[
        Sequence[float] | None, Option("(start, factor): raise end tokens' logits after start new tokens", decay)
    ]
    encoder_repetition_penalty: Annotated[
        float | None, Option("raise the logits of the prompt's tokens if above 1; 1: off", positive)
    ]
    encoder_no_repeat_ngram_size: Annotated[int | None, Option("repeat no n-gram of the prompt of this length", off)]
    remove_invalid_values: Annotated[bool | None, Option("replace logits that are not finite", flag)]


class Keywords(ScoreKeywords, total=False):
    """The options of a call; None, or left out, is the model's default or else the declared one."""

    max_new_tokens: Annotated[
        int | None,
        Option("stop after this many new tokens (default: the model's, or 256)", count, flags=NEW_TOKENS_FLAGS),
    ]
    temperature: Annotated[float, Option("divide the logits by this; 0: greedy", temperatures, 0.0)]
    top_k: Annotated[int | None, Option("keep the k most probable tokens; 0: all", counts_or_all)]
    top_p: Annotated[float | None, Option("keep the most probable tokens up to this total probability; 1: all", masses)]
    min_p: Annotated[
        float | None, Option("keep tokens with at least this fraction of the highest probability; 0: all", fractions)
    ]
    seed: Annotated[int | Sequence[int], Option("use this random seed", seeds, 0)]
    n: Annotated[int, Option("draw this many samples, with seeds that count up", count, 1)]
    stop: Annotated[
        str | Sequence[str] | None, Option(f"end the text before this string; {ESCAPES}; repeatable", texts)
    ]
    stop_token_ids: Annotated[
        int | Sequence[int],
        Option("end the text at this token; repeatable", ids_of, (), flags=("--stop-token-id",), metavar="ID"),
    ]
    ignore_eos: Annotated[bool, Option("continue after the model's end token", flag, False)]
    drafter: Annotated[str | Specification | None, Option("draft with this method; none: plain decoding")]
    rule: Annotated[
        Rule,
        Option("verify drafts by this rule: match or rejection", one_of(*RULES), "match", values=RULES),
    ]
    log_probs: Annotated[bool, Option("return the raw log probabilities of the new tokens", default=False)]
    top_log_probs: Annotated[int, Option("return the raw log probabilities of this many tokens at each place", off, 0)]
    processors: Annotated[
        Sequence[LogitsProcessor], Option("functions (tokens so far, logits [V]) -> logits [V]", functions, ())
    ]
    rows: Annotated[int, Option("decode at most this many prompts at the same time", count, 8)]
    on_prompt: Annotated[
        Callable[[int, int], None] | None,
        Option("function (prompt tokens read, prompt tokens in total)", allowed("a function", callable)),
    ]
    lora: Annotated[str | None, Option("decode with this loaded LoRA", lora_name)]
    adapter: Annotated[str | None, Option("draft with this loaded adapter", adapter_name)]
    schema: Annotated[
        str | Mapping[str, Any] | bool | type | None,
        Option("write JSON of this JSON schema, given as JSON or as a file of it", schemas, metavar="JSON|FILE"),
    ]
    regex: Annotated[str | None, Option("write a text that this regular expression matches", regex)]
    prediction: Annotated[
        str | Sequence[int] | None,
        Option(
            "draft from the text in this file, which the new text is expected to resemble", predictions, metavar="FILE"
        ),
    ]
    grammar: Annotated[str | None, Option("write a text of the Lark grammar in this file", lark, metavar="FILE")]


class ChatKeywords(Keywords, total=False):
    """The options of ``Model.chat``; besides these, it takes the variables that the model's chat template reads."""

    tools: Sequence[Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    continue_final_message: bool | str | None
    template: Mapping[str, Any]
    enable_thinking: bool


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The annotations of a class, evaluated without imports that take seconds; ``Annotated`` is kept."""
    return get_type_hints(kind, localns=SLOW, include_extras=True)


CALL: dict[str, Option] = {name: get_args(hint)[1] for name, hint in hints_of(Keywords).items()}
SCORES = tuple(hints_of(ScoreKeywords))
STRUCTURES = ("schema", "regex", "grammar")
DEFAULTS: Keywords = {name: option.default for name, option in CALL.items()}  # type: ignore[assignment]


def check(given: Mapping[str, Any]) -> None:
    """Raise InputError for an option of a call that does not exist, a value that is not allowed, or two structures."""
    check_each(given, CALL)
    structure_of(given)


def check_each(given: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    """Raise InputError for a name that is not among ``options`` or a value that its option does not allow."""
    if unknown := sorted(set(given) - set(options)):
        raise InputError(f"there is no option {unknown[0]!r}; options are {', '.join(options)}")
    for name, value in given.items():
        option = options[name]
        if option.check is not None and not (value is None and option.default is None):
            option.check(name, value)


def structure_of(given: Mapping[str, Any]) -> str | None:
    """The given one of ``STRUCTURES``; None if none is. Raises InputError for two."""
    names = [name for name in STRUCTURES if given.get(name) is not None]
    if len(names) > 1:
        raise InputError(f"{names[0]} and {names[1]} both say what the text may be; give one of them")
    return names[0] if names else None
