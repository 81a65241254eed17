"""Finding, loading and refusing the native library."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import pygdist.native
from pygdist.errors import InputError
from pygdist.native import Isa, NativeCsr, NativeHop, library

needs_library = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which the library is looked for, with nothing loaded yet."""
    monkeypatch.setattr(pygdist.native, "__path__", [str(tmp_path)])
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def header() -> str:
    return (Path(library.__file__).parent / "src" / "pygdist_native.h").read_text()


@needs_library
def test_loads_once() -> None:
    assert library.load() is library.load()


@needs_library
def test_functions_have_types() -> None:
    native = library.load()
    assert native is not None
    with pytest.raises(ctypes.ArgumentError):
        native.pygdist_spmm("not a matrix", 0, None, None)


@needs_library
def test_unknown_type_codes_are_refused() -> None:
    native = library.load()
    assert native is not None
    offsets = (ctypes.c_int64 * 1)(0)
    matrix = NativeCsr(indptr=ctypes.addressof(offsets), index_bits=32, value_bits=32, num_threads=1)
    assert native.pygdist_spmm(ctypes.byref(matrix), 0, None, None) == 0
    assert native.pygdist_spmm(ctypes.byref(matrix), 9, None, None) != 0
    matrix.value_bits = 16  # bfloat16: sums and means only
    assert native.pygdist_spmm(ctypes.byref(matrix), 0, None, None) == 0
    assert native.pygdist_spmm(ctypes.byref(matrix), 2, None, None) != 0
    assert native.pygdist_extremum(ctypes.byref(matrix), 2, None, None, None) != 0
    assert native.pygdist_sddmm(ctypes.byref(matrix), None, None, None, None) == 0
    assert native.pygdist_edge_softmax(ctypes.byref(matrix), None, None, None, 1.0, None) != 0
    matrix.op = 7
    assert native.pygdist_spmm(ctypes.byref(matrix), 0, None, None) != 0
    matrix.op, matrix.value_bits = 0, 8
    assert native.pygdist_spmm(ctypes.byref(matrix), 0, None, None) != 0
    assert native.pygdist_sddmm(ctypes.byref(matrix), None, None, None, None) != 0
    assert native.pygdist_extremum(ctypes.byref(matrix), 2, None, None, None) != 0
    assert native.pygdist_extremum_scatter(ctypes.byref(matrix), *[None] * 5) != 0
    assert native.pygdist_share_ties(ctypes.byref(matrix), None, None, None, None) != 0
    assert native.pygdist_extremum_grad(ctypes.byref(matrix), None, None, None, None) != 0


@needs_library
def test_instruction_set_is_capped_at_the_machine() -> None:
    try:
        assert library.set_isa(Isa.PORTABLE) is Isa.PORTABLE
        assert library.set_isa(Isa.AVX512) is library.set_isa(Isa.BEST)
    finally:
        library.set_isa(Isa.BEST)


def test_header_and_python_agree() -> None:
    text = header()
    assert f"#define PYGDIST_ABI_VERSION {library.ABI_VERSION}\n" in text
    declared = set(re.findall(r"PYGDIST_API int32_t (\w+)\(", text))
    assert declared == {"pygdist_abi_version", *library._SIGNATURES}
    for name, ours in (("csr", NativeCsr), ("hop", NativeHop)):
        struct = re.search(rf"typedef struct pygdist_{name} \{{(.*?)\}} pygdist_{name};", text, re.DOTALL)
        assert struct is not None
        fields = re.findall(r"(\w+);", re.sub(r"//.*", "", struct[1]))
        assert fields == [field for field, *_ in ours._fields_]


def test_missing_library_warns_once_and_says_what_to_do(folder: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"was not built.*apt install g\+\+"):
        assert library.load() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.load() is None
    with pytest.raises(RuntimeError, match="cannot choose the instruction set AVX2: there is no native library"):
        library.set_isa(Isa.AVX2)


def test_the_sources_without_a_build_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python starts in a clone, and an installed pygdist is passed over."""
    folder = tmp_path / "pygdist" / "native"
    (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(pygdist.native, "__path__", [str(folder)])
    library.load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning) as warned:
            assert library.load() is None
        with pytest.raises(InputError, match="which was not built here: start Python in a folder other than"):
            library.require("this")
    finally:
        library.load.cache_clear()
    text = str(warned[0].message)
    assert f"is not in {folder}: it was not built" in text
    assert f"Start Python in a folder other than {tmp_path}, if pygdist is installed; else install a C++17" in text


def test_unreadable_library_is_refused(folder: Path) -> None:
    (folder / library.LIBRARY_NAME).write_bytes(b"not an ELF file")
    with pytest.warns(RuntimeWarning, match=r"libpygdist_native\.so cannot be loaded"):
        assert library.load() is None


@needs_library
def test_other_abi_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load.cache_clear()
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with pytest.warns(RuntimeWarning, match="this pygdist needs 999"):
        assert library.load() is None
    library.load.cache_clear()
