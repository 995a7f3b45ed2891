"""Declarations are opt-in, not inherited, and checked; the spec travels as text."""

from __future__ import annotations

import itertools
from typing import NoReturn

import pytest

from dsafx import routing
from dsafx.ops import providers
from dsafx.ops.routing import BatchFacts, KernelCapabilities, LayerCapabilities, Route, RouteConfig

LENGTHS = (127, 128, 129, 3300)


class DenseLayer:
    dsa_capabilities = LayerCapabilities(dense_mha=True)

    def kv_b_weight(self) -> None: ...


class SubclassOfDense(DenseLayer):
    """Declares nothing."""


class SparseBase:
    dsa_kernels = KernelCapabilities(dense_mha=True, masked_mha=True, returns_lse=True)

    def dense_mha(self) -> None: ...

    def masked_mha(self) -> None: ...


class SparseOnly(SparseBase):
    """Declares nothing, and any touch of the dense path fails."""

    def __getattribute__(self, name: str) -> object:
        if name in ("dsa_kernels", "dense_mha", "masked_mha", "masked_mha_available"):
            self.fail(name)
        return super().__getattribute__(name)

    def fail(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was touched")


def route(layer: LayerCapabilities, kernels: KernelCapabilities, length: int) -> Route:
    spec = routing.RouteSpec(layer, kernels, RouteConfig(), 2048, 64, 192, 64, 256, 512)
    return routing.decide(spec, BatchFacts(length, length)).route


def test_every_flag_is_off_unless_declared():
    assert routing.declared(object()) == LayerCapabilities(dense_mha=False, masked_mha=False)
    kernels = KernelCapabilities()
    assert (kernels.dense_mha, kernels.masked_mha, kernels.returns_lse) == (False, False, False)


def test_a_declaration_is_not_inherited():
    assert routing.declared(DenseLayer()) == LayerCapabilities(dense_mha=True)
    assert routing.declared(SubclassOfDense()) == LayerCapabilities()


def test_an_instance_may_remove_a_flag_but_not_add_one():
    layer = DenseLayer()
    layer.dsa_without = ("dense_mha",)
    assert routing.declared(layer) == LayerCapabilities()
    added = SubclassOfDense()
    added.dsa_capabilities = LayerCapabilities(dense_mha=True)
    assert routing.declared(added) == LayerCapabilities()


@pytest.mark.parametrize("removed", [("dense",), "dense", ("costs",)])
def test_removing_what_is_no_flag_is_refused(removed: object):
    layer = DenseLayer()
    layer.dsa_without = removed
    with pytest.raises(ValueError, match="dsa_without accepts dense_mha, masked_mha, got '"):
        routing.declared(layer)


def test_a_declaration_of_another_type_is_refused():
    class Layer:
        dsa_capabilities = True

    with pytest.raises(TypeError, match=r"Layer\.dsa_capabilities must be a LayerCapabilities"):
        routing.declared(Layer())


def test_a_layer_that_declares_without_the_weight_fails_at_construction():
    class Layer:
        dsa_capabilities = LayerCapabilities(masked_mha=True)

        def __init__(self) -> None:
            routing.check_declaration(self)

    with pytest.raises(TypeError, match=r"Layer declares masked_mha .* requires kv_b_weight"):
        Layer()


def test_kernels_that_declare_without_the_function_fail_by_name():
    class Kernels:
        dsa_kernels = KernelCapabilities(dense_mha=True, masked_mha=True)

        def dense_mha(self) -> None: ...

    with pytest.raises(TypeError, match=r"Kernels declares masked_mha .* requires masked_mha"):
        routing.check_declaration(Kernels())


def test_a_required_name_may_be_inherited_and_a_property_is_not_run():
    class Base:
        @property
        def kv_b_weight(self) -> NoReturn:
            raise AssertionError("was run")

    class Layer(Base):
        dsa_capabilities = LayerCapabilities(dense_mha=True, masked_mha=True)

    routing.check_declaration(Layer())
    routing.check_declaration(SubclassOfDense())


@pytest.mark.parametrize("length", LENGTHS)
def test_kernels_that_inherit_from_a_dense_base_stay_sparse_and_untouched(length: int):
    backend = SparseOnly()
    routing.check_declaration(backend)
    kernels = routing.declared_kernels(backend)
    assert route(LayerCapabilities(True, True), kernels, length) is Route.SPARSE_MQA


@pytest.mark.parametrize("length", LENGTHS)
def test_flashinfer_on_sm120_is_sparse_at_every_length(length: int):
    rows = {(row.name, row.hardware): row for row in routing.known_backends()}
    sm120 = rows["FlashInfer sparse MLA", "SM120"]
    assert sm120.kernels == KernelCapabilities()
    assert route(LayerCapabilities(True, True), sm120.kernels, length) is Route.SPARSE_MQA


@pytest.mark.parametrize("length", LENGTHS)
def test_an_mqa_only_subclass_of_a_dense_layer_is_sparse_at_every_length(length: int):
    layer = routing.declared(SubclassOfDense())
    assert route(layer, SparseBase.dsa_kernels, length) is Route.SPARSE_MQA


def test_the_rows_of_this_package_are_what_its_providers_declare():
    rows = {row.name: row.kernels for row in routing.known_backends()}
    for provider in providers.PROVIDERS:
        assert rows[f"dsafx {provider.name}"] == provider.kernels


def test_a_spec_is_one_readable_line():
    text = routing.encode_spec(LayerCapabilities(True, True), RouteConfig(dense_threshold=7))
    assert text == (
        "dense_mha,masked_mha mode=auto dense_threshold=7 allow_approximate=False "
        "batch_invariant=False prefill_context_parallel=1 decode_context_parallel=1"
    )


def test_a_spec_survives_its_text():
    for dense, masked, mode, threshold, approximate, ranks in itertools.product(
        (False, True), (False, True), ("auto", "sparse", "masked", "dense"), (None, 0, 9),
        (False, True), (1, 4),
    ):  # fmt: skip
        layer = LayerCapabilities(dense, masked)
        config = RouteConfig(mode, threshold, approximate, False, ranks, 2 * ranks)
        assert routing.decode_spec(routing.encode_spec(layer, config)) == (layer, config)
    pinned = RouteConfig(batch_invariant=True)
    assert routing.decode_spec(routing.encode_spec(LayerCapabilities(), pinned))[1] == pinned


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("none ", "sparse_mqa ", "accepts the layer flags dense_mha, masked_mha, got 'sparse_mqa'"),
        ("mode=auto", "speed=auto", "got 'speed'"),
        ("mode=auto ", "", "spec lacks mode"),
        ("mode=auto", "mode=auto mode=auto", "spec repeats the field mode"),
        ("approximate=False", "approximate=no", "allow_approximate has a value .* 'no'"),
        ("parallel=1", "parallel=one", "prefill_context_parallel has a value .* 'one'"),
        ("mode=auto", "mode=fast", "mode must be one of"),
    ],
)
def test_a_spec_that_is_not_understood_is_refused(old: str, new: str, message: str):
    text = routing.encode_spec(LayerCapabilities(), RouteConfig())
    with pytest.raises(ValueError, match=message):
        routing.decode_spec(text.replace(old, new, 1))
