"""Every call into FlashInfer binds to its signature: recorded for three versions, and installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from inspect import Parameter, Signature
from typing import Any

import _flashinfer_cases as cases
import pytest
from _flashinfer_bodies import BODIES, numbers, real_signatures, recorder
from _flashinfer_signatures import SIGNATURES
from _foreign import Recorder, host_of, signature_of

from dsafx.ops.flashinfer import KERNELS, kernels
from dsafx.ops.flashinfer._limits import RAGGED_BACKENDS, SPARSE_BACKENDS

CALLED = {
    90: {
        "flashinfer.mla.BatchMLAPagedAttentionWrapper",
        "flashinfer.mla.BatchMLAPagedAttentionWrapper.plan",
        "flashinfer.mla.BatchMLAPagedAttentionWrapper.run",
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper",
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan",
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run",
        "flashinfer.top_k_ragged_transform",
        "flashinfer.merge_state",
    },
    100: {
        "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla",
        "flashinfer.prefill.trtllm_ragged_attention_deepseek",
        "flashinfer.top_k_ragged_transform",
        "flashinfer.merge_state",
    },
    120: {
        "flashinfer.mla.SparseMLASm120Wrapper",
        "flashinfer.mla.SparseMLASm120Wrapper.run",
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper",
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan",
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run",
        "flashinfer.top_k_ragged_transform",
        "flashinfer.merge_state",
    },
}


def every_call(architecture: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Op and arguments, with and without an LSE."""
    if architecture == 120:
        yield "sparse_mqa_paged", cases.paged("fp8_ds_mla")
        yield "sparse_mqa_paged", (*cases.paged("fp8_ds_mla"), None, False)
    elif architecture in SPARSE_BACKENDS:
        yield "sparse_mqa_paged", cases.paged("bf16")
        yield "sparse_mqa", (*cases.packed(), False)
        yield "sparse_mla", cases.packed().parts()
    if architecture in RAGGED_BACKENDS:
        yield "dense_mha", cases.dense()
    yield "select_topk", cases.scores()
    yield "merge_attention", cases.states()


def called(
    signatures: Mapping[str, Signature], version: tuple[int, ...], architecture: int
) -> set[str]:
    """Call every op once on these signatures; the functions that were called."""
    recorded = Recorder(signatures, BODIES)
    found = kernels(host_of(recorded, architecture, version))
    for op, args in every_call(architecture):
        if op == "select_topk" and found[op].supports(*args) is not None:
            continue
        assert found[op].supports(*args) is None
        found[op].run(*args)
    return {name for name, _ in recorded.calls}


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
@pytest.mark.parametrize("version", SIGNATURES)
def test_every_call_binds_to_the_recorded_signature(version, architecture):
    signatures = {name: signature_of(text) for name, text in SIGNATURES[version].items()}
    assert called(signatures, numbers(version), architecture)


@pytest.mark.parametrize("architecture", CALLED)
def test_every_call_binds_to_the_signature_of_the_installed_package(architecture):
    signatures = _real()
    version = numbers(metadata.version("flashinfer-python"))
    found = called(signatures, version, architecture) - {"flashinfer.mla.MLAPlanMetadata.csr"}
    if version >= (0, 7):
        assert found == CALLED[architecture]
    assert found <= set(signatures)


def test_the_recorded_signatures_are_those_of_the_installed_package():
    signatures = _real()
    version = metadata.version("flashinfer-python")
    if version not in SIGNATURES:
        pytest.skip(f"FlashInfer {version} is installed, whose signatures are not recorded")
    recorded = {name: signature_of(text) for name, text in SIGNATURES[version].items()}
    assert {name: _names(signature) for name, signature in signatures.items()} == {
        name: _names(signature) for name, signature in recorded.items()
    }


@pytest.mark.parametrize(
    ("op", "name", "without"),
    [
        ("sparse_mqa", "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla", "sparse_mla_top_k="),
        ("dense_mha", "flashinfer.prefill.trtllm_ragged_attention_deepseek", "max_kv_len"),
        ("select_topk", "flashinfer.top_k_ragged_transform", "row_starts="),
    ],
)
def test_a_call_that_a_signature_does_not_take_fails(op, name, without):
    texts = SIGNATURES["0.7.4"]
    parts = [part for part in texts[name].split(", ") if part != without]
    signatures = {name: signature_of(text) for name, text in texts.items()}
    signatures[name] = signature_of(", ".join(parts))
    found = kernels(host_of(Recorder(signatures, BODIES), 100, (0, 7, 4)))
    args = next(args for called, args in every_call(100) if called == op)
    with pytest.raises(TypeError, match="argument"):
        found[op].run(*args)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ((0, 6, 17), "from 0.6.18 to below 0.8, got 0.6.17"),
        ((0, 8, 0), "from 0.6.18 to below 0.8, got 0.8.0"),
        ((0, 6, 18), None),
        ((0, 7, 9), None),
    ],
)
def test_a_version_out_of_range_is_refused_with_the_range(version, reason):
    found = kernels(host_of(recorder("0.7.4"), 100, version))
    for op, args in every_call(100):
        refusal = found[op].supports(*args)
        assert refusal == (None if reason is None else f"flashinfer-python must be {reason}")


def test_without_a_device_nothing_else_is_asked():
    def asked(*args: object) -> Any:
        raise AssertionError("torch.cuda or flashinfer was asked without a device")

    host = replace(
        host_of(recorder("0.7.4"), 90, (0, 7, 4)),
        available=lambda: False,
        function=asked,
        version=asked,
        architecture=asked,
        capturing=asked,
        stream=asked,
    )
    for op, args in every_call(90):
        assert kernels(host)[op].supports(*args) == "there is no CUDA device"


def test_a_function_that_the_version_does_not_have_is_named():
    found = kernels(host_of(Recorder({}, {}), 100, (0, 7, 4)))
    for op, args in every_call(100):
        assert "is not there: no flashinfer." in str(found[op].supports(*args))


def test_a_package_that_is_not_installed_is_named():
    def missing() -> tuple[int, ...]:
        raise metadata.PackageNotFoundError("flashinfer-python")

    host = replace(host_of(recorder("0.7.4"), 100), version=missing)
    for op, args in every_call(100):
        assert kernels(host)[op].supports(*args) == "flashinfer-python is not installed"


def test_the_provider_itself_answers_on_a_machine_without_a_device():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for op, args in every_call(100):
        assert KERNELS[op].supports(*args) == "there is no CUDA device"


def test_importing_the_providers_imports_no_library_and_asks_no_device():
    code = (
        "import sys\n"
        "for name in ('flashinfer', 'flash_mla', 'deep_gemm', 'triton'): sys.modules[name] = None\n"
        "import torch\n"
        "def asked(*args): raise AssertionError('a device was asked')\n"
        "for name in ('is_available', 'device_count', 'current_device',\n"
        "             'get_device_capability'): setattr(torch.cuda, name, asked)\n"
        "import dsafx.ops.flashinfer, dsafx.ops.flash_mla, dsafx.ops.deep_gemm\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _real() -> dict[str, Signature]:
    try:
        return real_signatures()
    except ImportError as error:
        pytest.skip(f"flashinfer cannot be imported here: {error}")


def _names(signature: Signature) -> list[tuple[str, str, bool]]:
    return [
        (each.name, each.kind.name, each.default is not Parameter.empty)
        for each in signature.parameters.values()
    ]
