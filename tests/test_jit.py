"""Cubins: what is compiled, what their key covers, and a cache that cannot be poisoned."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest

from ctatune import jit
from ctatune.config import Baseline, Tile
from ctatune.problem import Problem
from ctatune.space import default_config

CONFIG = default_config(Problem(m=4096, k=8192, h=8192, n=8192, gpus=2))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CTATUNE_CACHE", str(tmp_path))
    return tmp_path


def test_preamble_reads_as_text():
    assert jit.preamble(CONFIG) == (
        "constexpr int kUpM = 128;\n"
        "constexpr int kUpN = 256;\n"
        "constexpr int kUpSplit = 1;\n"
        "constexpr int kDownM = 128;\n"
        "constexpr int kDownN = 256;\n"
        "constexpr int kDownSplit = 1;\n"
        "constexpr int kStages = 3;\n"
        "constexpr int kSlabs = 4;\n"
        "constexpr bool kMulticast = true;\n"
        "constexpr bool kDirect = false;\n"
        "constexpr bool kReduce = false;\n"
        "constexpr bool kSwap = false;\n"
        "constexpr bool kSkipWait = false;\n"
    )


def test_the_order_of_tiles_needs_no_compile():
    other = replace(CONFIG, mix=0.5, up=replace(CONFIG.up, group_m=8))
    assert jit.preamble(other) == jit.preamble(CONFIG)


def test_the_kernel_compiles_here(folder):
    tile = Tile(m=64, n=128)  # the quickest to compile
    small = replace(CONFIG, up=tile, down=tile, stages=2, d_slabs=2)
    cubin = jit.cubin("mlp", jit.preamble(small))
    assert cubin.startswith(b"\x7fELF")
    assert [path.read_bytes()[32:] for path in folder.iterdir()] == [cubin]


def test_kernels_compile_together_and_one_that_cannot_is_left_out(folder, monkeypatch):
    tile = Tile(m=64, n=128)
    small = replace(CONFIG, up=tile, down=tile, stages=2, d_slabs=2)
    deeper, refused = replace(small, stages=3), replace(small, up=replace(tile, n=72))
    jit.compile_together([small, Baseline(), deeper, replace(small, mix=0.5), refused])
    assert len(list(folder.iterdir())) == 2
    jit.compile_together([replace(small, d_slabs=3), replace(small, d_slabs=4)], 0.01)
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("it is in the cache"))
    for config in (small, deeper):
        assert jit.cubin("mlp", jit.preamble(config)).startswith(b"\x7fELF")


def test_a_damaged_cubin_is_compiled_again(folder, caplog):
    good = jit.cubin("support")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for damage in (b"half", whole[:-100], whole[:200] + b"x" + whole[201:]):
        path.write_bytes(damage)
        caplog.clear()
        assert jit.cubin("support") == good
        assert "damaged" in caplog.text
        assert path.read_bytes() == whole


def test_each_constant_and_each_wheel_has_its_own_cubin(folder, monkeypatch):
    compiled = []
    monkeypatch.setattr(jit, "_compile", lambda _, text: compiled.append(text) or b"\x7fELF")
    jit.cubin("mlp", jit.preamble(CONFIG))
    jit.cubin("mlp", jit.preamble(CONFIG))
    jit.cubin("mlp", jit.preamble(CONFIG, skip_wait=True))
    jit.cubin("mlp", jit.preamble(replace(CONFIG, stages=2)))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99")
    jit.cubin("mlp", jit.preamble(CONFIG))
    assert len(compiled) == len(list(folder.iterdir())) == 4


@pytest.mark.usefixtures("folder")
def test_a_compile_error_is_one_line():
    with pytest.raises(jit.CompileError, match=r"support\.cu: .*needs an owner") as caught:
        jit.cubin("support", "#error needs an owner\n")
    assert "\n" not in str(caught.value)


def test_the_hash_ignores_comments_and_blank_space(monkeypatch):
    before = jit.kernel_hash()
    text = jit.source("mlp")
    for edit, same in [
        (text.replace("// An", "// One"), True),
        (text + "\n\n// end\n", True),
        (text.replace("spin % 64", "spin % 65"), False),
    ]:
        monkeypatch.setattr(jit, "source", lambda _, edit=edit: edit)
        jit.kernel_hash.cache_clear()
        assert (jit.kernel_hash() == before) is same
    jit.kernel_hash.cache_clear()


def test_a_change_of_the_code_ends_what_older_versions_count_for(monkeypatch):
    file = {
        "new": {"same code": {"moved": "why"}, "as fast": {"old": "why"}},
        "moved": {"as fast": {"older": "why"}},
        "old": {"same code": {"oldest": "why"}, "as fast with whole tiles": {"ragged": "why"}},
        "ragged": {"as fast": {"first": "why"}},
        "other": {"as fast": {"new": "why"}},
    }
    monkeypatch.setattr(jit, "_equal_kernels", lambda: file)
    monkeypatch.setattr(jit, "kernel_hash", lambda: "new")
    assert jit.present_kernels() == {"new", "moved"}
    assert jit.equal_kernels() == {"old", "older", "oldest"}
    assert jit.equal_with_whole_tiles() == {"ragged", "first"}
    monkeypatch.setattr(jit, "kernel_hash", lambda: "changed")
    assert (jit.present_kernels(), jit.equal_kernels()) == ({"changed"}, frozenset())


def test_each_shipped_version_is_linked_once():
    file = jit._equal_kernels()
    olds = [old for kinds in file.values() for link in kinds.values() for old in link]
    assert len(set(olds)) == len(olds)
    counted = jit.present_kernels(), jit.equal_kernels(), jit.equal_with_whole_tiles()
    assert sum(map(len, counted)) == 1 + len(olds)
