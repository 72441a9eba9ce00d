"""Specifications as values: read, printed, refused, resolved; and a method of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from anabranch.drafting.combined import CombinedDrafter
from anabranch.drafting.settings import Settings
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import Drafter, Method, Row, Spec, make_drafter, parse_spec, register, resolve_spec
from anabranch.methods import registry as methods
from anabranch.tree import DraftTree
from small import decode, request, small, small_adapter


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("none", "none"),
        (" none ", "none"),
        ("streams", "streams"),
        ("streams:", "streams"),
        ("streams:tree=best", "streams"),
        ("streams:tree=8", "streams:nodes=8"),
        ("streams:nodes=8", "streams:nodes=8"),
        ("streams:tree=auto,nodes=12", "streams:tree=auto,nodes=12"),
        ("streams: k=3 , tree=product", "streams:tree=product,k=3"),
        ("streams:condition=no,threshold=0.25", "streams:threshold=0.25,condition=no"),
        ("streams:condition=yes", "streams"),
        ("medusa:tree=12", "medusa:nodes=12"),
        ("ngram:tree=8,order=2", "ngram:nodes=8,order=2"),
        ("space:tree=8,placement=ride", "space:nodes=8,placement=ride"),
        ("prompt_lookup:ngram=2,tokens=4", "prompt_lookup:tokens=4,ngram=2"),
        ("prompt_lookup:tokens=auto", "prompt_lookup:tokens=auto"),
        ("streams:tree=8 + prompt_lookup:tokens=4", "streams:nodes=8+prompt_lookup:tokens=4"),
        ("auto", "auto"),
        (" auto ", "auto"),
    ],
)
def test_a_specification_is_printed_as_it_is_read(text: str, printed: str) -> None:
    spec = parse_spec(text)
    assert str(spec) == printed
    assert parse_spec(printed) == spec
    assert parse_spec(spec) is spec
    assert hash(parse_spec(printed)) == hash(spec)
    assert spec.auto == (printed == "auto")
    assert spec.plain == (printed == "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no drafter ''; drafters are none, streams, prompt_lookup"),
        ("speculate", "there is no drafter 'speculate'"),
        ("auto:tree=8", "'auto' takes no settings and cannot be combined"),
        ("auto+streams", "'auto' takes no settings and cannot be combined"),
        ("streams+", "there is no drafter ''"),
        ("streams+streams:tree=8", "names a method twice"),
        ("none+streams", "'none' cannot be combined"),
        ("none:k=2", "has no setting 'k=2'; settings are none"),
        ("streams:width=3", "has no setting 'width=3'; settings are tree, nodes"),
        ("streams:k", "has no setting 'k'.*as name=value"),
        ("streams:k=2,k=3", "the setting 'k' twice"),
        ("streams:tree=4,nodes=8", "the setting 'nodes' twice"),
        ("streams:k=many", "'k' of the drafter 'streams' must be a whole number, got 'many'"),
        ("streams:k=1.5", "a whole number, got '1.5'"),
        ("streams:threshold=high", "must be a number, got 'high'"),
        ("streams:threshold=2", "threshold must be a probability"),
        ("streams:condition=perhaps", "must be yes or no, got 'perhaps'"),
        ("streams:k=0", "k must be at least 1"),
        ("streams:nodes=1", "nodes must be at least 2"),
        ("streams:tree=1", "nodes must be at least 2"),
        ("streams:tree=oak", "best, product, chain, auto, got 'oak'"),
        ("streams:k=-1", "k must be at least 1, got -1"),
        ("streams:depth=-1", "depth must be at least 0, got -1"),
        ("streams:frontier=0", "frontier must be at least 1, got 0"),
        ("streams:tree=chain,nodes=4", "nodes is the budget of tree=best, got nodes=4 with tree=chain"),
        ("streams:tree=product,nodes=4", "nodes is the budget of tree=best, got nodes=4 with tree=product"),
        ("space:tree=chain,nodes=4", "nodes is the budget of tree=best, got nodes=4 with tree=chain"),
        ("medusa:tree=chain,nodes=4", "nodes is the budget of tree=best, got nodes=4 with tree=chain"),
        ("eagle:tree=chain,nodes=4", "nodes is the budget of tree=best, got nodes=4 with tree=chain"),
        ("draft_model:tree=chain,nodes=4", "nodes is the budget of tree=best, got nodes=4 with tree=chain"),
        ("streams:tree=product,k=8,depth=4", "more than 1,024 nodes"),
        ("prompt_lookup:tokens=few", "at least 1, or auto, got 'few'"),
        ("medusa:tree=wide", "tree must be a number of nodes or one of best, chain, sparse, product, auto, got 'wide'"),
        ("hydra:tree=sparse", "one of best, chain, product, auto, got 'sparse'"),
        ("eagle:tree=wide", "one of best, static, chain, auto, got 'wide'"),
        ("eagle:depth=0", "depth must be at least 1, got 0"),
        ("eagle:threshold=1", "threshold must be a probability"),
        ("space:prune=8", "no setting 'prune=8'"),
        ("draft_model:tree=oak", "best, chain, iid, without, auto, got 'oak'"),
        ("draft_model:tokens=300", "from 1 to 256, or auto, got '300'"),
        ("draft_model:tokens=few", "from 1 to 256, or auto, got 'few'"),
        ("draft_model:nodes=9999", "nodes must be at most 1,024, got 9999"),
        ("draft_model:tree=iid,k=0", "k must be at least 1, got 0"),
        ("draft_model:tree=iid,k=2/", "k must be a whole number, or several"),
        ("draft_model:tree=iid,k=8,tokens=9", "9 tokens with 8 children a node make more than 1,024 nodes"),
        ("draft_model:quantize=int3", "quantize must be one of"),
        ("draft_model:folder=x", "has no setting 'folder=x'; settings are model, tree, nodes, tokens"),
        ("staged:inner=none", "must be one of prompt_lookup, suffix, ngram, rest, draft_model, staged, got 'none'"),
        ("staged:inner=oak:tokens=2", "inner must be one of .*, got 'oak'"),
        ("staged:inner=prompt_lookup:tokens=0", "at least 1, or auto, got '0'"),
        ("lookahead:ngram=2", "ngram must be at least 3"),
        ("lookahead:prompt=maybe", "must be yes or no, got 'maybe'"),
        ("lookahead:nodes=3", "settings are window, ngram, guesses, prompt"),
        ("suffix:nodes=1", "nodes must be a whole number of at least 2, or auto, got '1'"),
        ("suffix:nodes=many", "or auto, got 'many'"),
        ("suffix:depth=0", "depth must be at least 1, got 0"),
        ("suffix:threshold=1", "less than 1, got 1.0"),
        ("suffix:threshold=-0.1", "at least 0"),
        ("suffix:store=1", "store must be 64 to .* or 0 to keep no outputs, got 1"),
        ("suffix:store=-5", "got -5"),
        ("suffix:store=99999999999", "got 99999999999"),
        ("suffix:memory=1", "settings are nodes, depth, threshold, store"),
        ("rest:ngram=17", "ngram must be from 1 to 16, got 17"),
        ("rest:depth=0", "depth must be at least 1, got 0"),
        ("rest:tree=chain", "tree must be a number of nodes or one of best, auto, got 'chain'"),
        ("ngram:tree=wide", "tree must be a number of nodes or one of best, auto, chain, got 'wide'"),
        ("ngram:order=4", "order must be 1, 2 or 3, got 4"),
    ],
)
def test_what_is_no_specification_is_refused_before_any_model_is_loaded(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_spec(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be a string such as 'streams'.*got 5"):
        parse_spec(5)  # type: ignore[arg-type]


def test_auto_is_every_default_method_that_can_be_had() -> None:
    target = small()
    assert str(resolve_spec("auto")) == str(resolve_spec("auto", None)) == "prompt_lookup:tokens=auto"
    whole = resolve_spec("auto", small_adapter(target))
    assert str(whole) == "streams:tree=auto,copy=yes+prompt_lookup:tokens=auto"
    assert resolve_spec(whole) is whole
    assert str(resolve_spec("streams", None)) == "streams", "only auto is resolved"
    drafter = make_drafter("auto", target, small_adapter(target))
    assert isinstance(drafter, CombinedDrafter)
    assert drafter.adaptive
    assert drafter.max_nodes == 24
    assert make_drafter("auto", target).name == "prompt_lookup"


def test_a_method_without_its_module_is_refused() -> None:
    for text in ("streams", "streams+prompt_lookup"):
        with pytest.raises(CapabilityError, match="needs an adapter"):
            make_drafter(text, small())


def test_the_nodes_of_a_merged_tree() -> None:
    target = small()
    adapter = small_adapter(target)
    assert make_drafter("streams:tree=12+prompt_lookup", target, adapter).max_nodes == 12
    assert make_drafter("prompt_lookup+streams", target, adapter).max_nodes == 16
    assert not make_drafter("streams:tree=12+prompt_lookup", target, adapter).adaptive
    assert make_drafter("streams:tree=12+prompt_lookup:tokens=auto", target, adapter).adaptive


# -- a method of the user's own ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class EchoSettings(Settings):
    times: int = 2
    loud: bool = False


class Echo(Drafter):
    """Proposes the last token again."""

    name = "echo"

    def __init__(self, settings: EchoSettings) -> None:
        self.settings, self.max_nodes = settings, settings.times + 1

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        counts = [min(self.settings.times, row.max_depth, budget - 1) for row in rows]
        return [
            DraftTree.chain(row.root, [row.root] * n, source="echo", log_probs=[-1.0 - i for i in range(n)])
            for row, n in zip(rows, counts, strict=True)
        ]


ECHO = Method("echo", "the last token again", EchoSettings, lambda target, settings, module: Echo(settings))


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registry", methods.methods())


@pytest.mark.usefixtures("_registry")
def test_a_registered_method_serves_like_the_librarys_own() -> None:
    with pytest.raises(InputError, match="there is no drafter 'echo'"):
        parse_spec("echo")
    register(ECHO)
    register(ECHO)
    assert [method.name for method in methods.methods()].count("echo") == 1
    assert str(parse_spec("echo:loud=yes,times=3")) == "echo:times=3,loud=yes"
    assert str(resolve_spec("auto")) == "prompt_lookup:tokens=auto", "not a default"
    target = small()
    asked = [request(5, n, 20) for n in range(2)]
    wanted, _ = decode(target, asked)
    for text in ("echo", "echo:times=4+prompt_lookup"):
        assert decode(target, asked, make_drafter(text, target), rows=2)[0] == wanted


@pytest.mark.parametrize("name", ["none", "streams", "prompt_lookup"])
@pytest.mark.usefixtures("_registry")
def test_the_librarys_own_methods_are_not_replaced(name: str) -> None:
    with pytest.raises(InputError, match=f"the name '{name}' is taken"):
        register(Method(name, "", Settings, lambda *_: Echo(EchoSettings())))


@pytest.mark.parametrize("name", ["auto", "", "two words", "a+b", "a:b", "1st"])
@pytest.mark.usefixtures("_registry")
def test_names_that_cannot_be_written(name: str) -> None:
    with pytest.raises(InputError, match="must be an identifier"):
        register(Method(name, "", Settings, lambda *_: Echo(EchoSettings())))


def test_specs_are_values() -> None:
    assert Spec() == parse_spec("auto")
    assert len({parse_spec("streams:tree=8"), parse_spec("streams:nodes=8"), parse_spec("streams")}) == 2
